"""Requests whose answer is worth nothing after a time, by that time."""

from __future__ import annotations

from heapq import heappop, heappush

from coppice_scheduler.core.sequences import RequestState, RequestStatus


class Deadlines:
    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RequestState]] = []  # those that ended are dropped lazily

    def add(self, request: RequestState) -> None:
        if request.request.deadline_ns is not None:
            heappush(self._heap, (request.request.deadline_ns, request.order[1], request))

    def next_ns(self) -> int | None:
        while self._heap and self._heap[0][2].status is RequestStatus.FINISHED:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_ns: int) -> RequestState | None:
        """One whose time is over; it stays listed until it is finished."""
        next_ns = self.next_ns()
        return self._heap[0][2] if next_ns is not None and next_ns <= now_ns else None
