"""A heap whose entries may stop counting where they lie.

They are dropped when they come to the top, and all at once before the heap would grow beyond twice of what counted
last: what never comes to the top (a low priority behind a steady flow of higher ones) must not stay for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

SWEEP_MIN = 64
E = TypeVar("E", bound=tuple[Any, ...])


class LazyHeap(Generic[E]):
    def __init__(self, counts: Callable[[E], bool]) -> None:
        """`counts`: whether an entry still does; one that does not never will again."""
        self._counts = counts
        self._entries: list[E] = []
        self._sweep_at = SWEEP_MIN

    def __len__(self) -> int:
        """With those that count no more."""
        return len(self._entries)

    def __iter__(self) -> Iterator[E]:
        """Those that count, in no order."""
        return filter(self._counts, self._entries)

    def push(self, entry: E) -> None:
        if len(self._entries) >= self._sweep_at:
            self._entries = list(self)
            heapify(self._entries)
            self._sweep_at = max(SWEEP_MIN, 2 * len(self._entries))
        heappush(self._entries, entry)

    def first(self) -> E | None:
        """The least that counts."""
        entries = self._entries
        while entries and not self._counts(entries[0]):
            heappop(entries)
        return entries[0] if entries else None
