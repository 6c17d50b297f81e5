"""The order inside a tenant.

    priority  ->  earliest deadline, of those that have one  ->  longest match, as far as age lets it
                  |                                              |
                  may overtake by `max_overtake`                 its time of arrival is taken to be earlier by
                                                                 max_overtake * (matched tokens / tokens)

So nobody is overtaken, within its priority, by a request that came more than `max_overtake` later: what is cached goes
first while it is there, and a cold prompt waits for no more than what came within that time. The order of two requests
without deadlines never changes by itself, so plain heaps hold it.
"""

from __future__ import annotations

from heapq import nsmallest

from coppice_scheduler.core.queue.lazy_heap import LazyHeap
from coppice_scheduler.core.state.sequences import RequestState, RequestStatus

Entry = tuple[int, int, int, int, RequestState]  # priority, time, arrival, stamp, request


class TenantQueue:
    """Waiting requests of one tenant. A stamp is a request's last place in the line: older ones count no more."""

    __slots__ = ("_by_age", "_by_deadline", "_max_overtake_ns")

    def __init__(self, max_overtake_ns: int) -> None:
        self._max_overtake_ns = max_overtake_ns
        self._by_age: LazyHeap[Entry] = LazyHeap(_stands)
        self._by_deadline: LazyHeap[Entry] = LazyHeap(_stands)

    def push(self, request: RequestState) -> None:
        """Give it its place; one that it had before is worth nothing any more."""
        request.stamp += 1
        priority, arrival = request.order
        credit_ns = self._max_overtake_ns * request.num_matched // request.num_tokens
        self._by_age.push((priority, request.since_ns - credit_ns, arrival, request.stamp, request))
        deadline_ns = request.request.deadline_ns
        if deadline_ns is not None:
            self._by_deadline.push((priority, deadline_ns, arrival, request.stamp, request))

    def pop(self) -> RequestState:
        request = self.head()
        assert request is not None
        request.stamp += 1
        return request

    def head(self) -> RequestState | None:
        """Who goes next."""
        oldest = self._by_age.first()
        if oldest is None:
            return None
        priority, age_ns, _, _, first = oldest
        soonest = self._by_deadline.first()
        if soonest is not None:
            urgent = soonest[4]
            if urgent.order[0] == priority and urgent.since_ns <= age_ns + self._max_overtake_ns:
                return urgent
        return first

    def first(self, count: int) -> list[RequestState]:
        """Up to `count` of those that go soon, in about their order."""
        return [entry[4] for entry in nsmallest(count, self._by_age)]


def _stands(entry: Entry) -> bool:
    request = entry[4]
    return entry[3] == request.stamp and request.status is RequestStatus.WAITING
