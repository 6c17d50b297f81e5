"""Which leaf goes first: least recently used, per (worker, domain).

A heap with lazy entries. Every evictable leaf has an entry that carries the leaf's `last_use_ns`; an entry whose leaf
was pinned, grown over, evicted or used since is dropped when it comes up. A partly trimmed leaf keeps its entry. When
most entries are dead the heap is rebuilt, so its size follows the number of leaves, not the number of releases.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from coppice_cache.core.radix import Node

_SLACK = 64


class EvictionQueue:
    """Evictable leaves of one domain on one worker, coldest first."""

    __slots__ = ("_compact_at", "_heap", "_order")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._order = 0
        self._compact_at = _SLACK

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """Called whenever a node may have become evictable; anything else is ignored."""
        if not node.is_evictable:
            return
        self._order += 1
        heappush(self._heap, (node.last_use_ns, self._order, node))
        if len(self._heap) > self._compact_at:
            self._compact()

    def coldest(self) -> Node:
        """The next victim. It is a bug to ask when nothing is evictable."""
        while True:
            assert self._heap, "no evictable leaf, although the ledger counted one"
            last_use_ns, _, node = self._heap[0]
            if node.is_evictable and node.last_use_ns == last_use_ns:
                return node
            heappop(self._heap)

    def entries(self) -> set[int]:
        """Identities of the nodes that have a live entry; for checks."""
        return {id(node) for used, _, node in self._heap if node.is_evictable and node.last_use_ns == used}

    def _compact(self) -> None:
        newest: dict[int, tuple[int, int, Node]] = {}
        for entry in self._heap:
            if entry[2].is_evictable and entry[2].last_use_ns == entry[0]:
                newest[id(entry[2])] = entry
        self._heap = list(newest.values())
        heapify(self._heap)
        self._compact_at = 2 * len(self._heap) + _SLACK
