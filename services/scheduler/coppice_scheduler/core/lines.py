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

from heapq import heappop, heappush, nsmallest

from coppice_scheduler.core.sequences import RequestState, RequestStatus

Entry = tuple[int, int, int, int, RequestState]  # priority, time, arrival, stamp, request


class Line:
    """Waiting requests of one tenant. Entries are dropped lazily: a stamp is a request's last place in the line."""

    __slots__ = ("_by_age", "_by_deadline", "_max_overtake_ns")

    def __init__(self, max_overtake_ns: int) -> None:
        self._max_overtake_ns = max_overtake_ns
        self._by_age: list[Entry] = []
        self._by_deadline: list[Entry] = []

    def push(self, request: RequestState) -> None:
        """Give it its place; one that it had before is worth nothing any more."""
        request.stamp += 1
        priority, arrival = request.order
        credit_ns = self._max_overtake_ns * request.num_matched // request.num_tokens
        heappush(self._by_age, (priority, request.since_ns - credit_ns, arrival, request.stamp, request))
        deadline_ns = request.request.deadline_ns
        if deadline_ns is not None:
            heappush(self._by_deadline, (priority, deadline_ns, arrival, request.stamp, request))

    def pop(self) -> RequestState:
        request = self.head()
        assert request is not None
        request.stamp += 1
        return request

    def head(self) -> RequestState | None:
        """Who goes next."""
        self._drop_left(self._by_age)
        self._drop_left(self._by_deadline)
        if not self._by_age:
            return None
        priority, age_ns, _, _, first = self._by_age[0]
        if self._by_deadline:
            urgent = self._by_deadline[0][4]
            if urgent.order[0] == priority and urgent.since_ns <= age_ns + self._max_overtake_ns:
                return urgent
        return first

    def first(self, count: int) -> list[RequestState]:
        """Up to `count` of those that go soon, in about their order."""
        entries = nsmallest(count, (entry for entry in self._by_age if _stands(entry)))
        return [entry[4] for entry in entries]

    @staticmethod
    def _drop_left(heap: list[Entry]) -> None:
        while heap and not _stands(heap[0]):
            heappop(heap)


def _stands(entry: Entry) -> bool:
    request = entry[4]
    return entry[3] == request.stamp and request.status is RequestStatus.WAITING
