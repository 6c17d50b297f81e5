"""In which order the waiting lines are looked at while places are given out."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace

from coppice_scheduler.core.policy.virtual_time import Ranks
from coppice_scheduler.core.queue.queues import WaitingQueue
from coppice_scheduler.core.state.sequences import RequestState

UNKNOWN = (-(1 << 62), 0)  # order of a head that was not looked at: before every other


class DispatchOrder:
    """A heap of the lines by the turns of their tenants, then by the orders of their heads. In it a line may only come
    to stand later than it did; who makes one stand earlier, or appear, starts over with a new heap."""

    def __init__(self, queue: WaitingQueue, ranks: Ranks) -> None:
        self._queue = queue
        self._ranks = ranks
        keys = queue.lines()
        turns = ranks.turns([number for number, _ in keys])
        self._heap = [(turn, UNKNOWN, key) for turn, key in zip(turns, keys, strict=True)]
        heapify(self._heap)

    def next(self, skip: Callable[[RequestState], bool], bar: float) -> RequestState | None:
        """Who goes next: of the heads that are not skipped, that of the tenant whose turn is first. Nobody of a rank
        of `bar` or more."""
        heap = self._heap
        skipped = []
        found: RequestState | None = None
        while found is None and heap and heap[0][0][0] < bar:
            entry = heap[0]
            key = entry[2]
            head = self._queue.head(key)
            if head is None:
                heappop(heap)
                continue
            now = self._ranks.turn(key[0]), head.order, key
            if now != entry:
                heapreplace(heap, now)
            elif skip(head):
                skipped.append(heappop(heap))
            else:
                found = head
        for entry in skipped:
            heappush(heap, entry)
        return found
