"""Requests whose answer is worth nothing after a time, by that time."""

from __future__ import annotations

from coppice_scheduler.core.queue.lazy_heap import LazyHeap
from coppice_scheduler.core.state.sequences import RequestState, RequestStatus

Entry = tuple[int, int, RequestState]  # deadline, arrival, request


class Deadlines:
    def __init__(self) -> None:
        self._by_time: LazyHeap[Entry] = LazyHeap(_is_open)

    def add(self, request: RequestState) -> None:
        if request.request.deadline_ns is not None:
            self._by_time.push((request.request.deadline_ns, request.order[1], request))

    def next_ns(self) -> int | None:
        first = self._by_time.first()
        return first[0] if first is not None else None

    def due(self, now_ns: int) -> RequestState | None:
        """One whose time is over; it stays listed until it is finished."""
        first = self._by_time.first()
        return first[2] if first is not None and first[0] <= now_ns else None


def _is_open(entry: Entry) -> bool:
    return entry[2].status is not RequestStatus.FINISHED
