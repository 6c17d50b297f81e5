"""Virtual time: a heap of things to do, in the order of (time, when they were planned)."""

from __future__ import annotations

import heapq
from collections.abc import Callable

MS = 1_000_000  # ns


class Timeline:
    """`now_ns` moves only when the next event is taken."""

    def __init__(self, start_ns: int = 1_000 * MS) -> None:
        self.now_ns = start_ns
        self.num_done = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_ns: int, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(time_ns, self.now_ns), self._count, action))

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        self.at(self.now_ns + delay_ns, action)

    def step(self) -> bool:
        """Do the next thing. False: nothing is planned any more."""
        if not self._heap:
            return False
        self.now_ns, _, action = heapq.heappop(self._heap)
        self.num_done += 1
        action()
        return True
