"""Which blocks of the trees are sampled, and what the small caches hear of them.

a run of the tree     |.|x|.|.|x|.|        marks: the places in it of sampled blocks, with their seals
"""

from __future__ import annotations

from coppice.seals import SEAL_BYTES
from coppice_cache.core.eviction.miniatures import Miniatures
from coppice_cache.core.radix.tree import Node

Mark = tuple[int, bytes]


class Floor:
    """`caches` know who would have hit what."""

    __slots__ = ("_marks", "caches")

    def __init__(self) -> None:
        self.caches = Miniatures()
        self._marks: dict[Node, list[Mark]] = {}

    def __len__(self) -> int:
        """Runs with sampled blocks."""
        return len(self._marks)

    def fit(self, num_cached: int) -> None:
        """To a domain of so many blocks."""
        if self.caches.fit(num_cached):
            samples = self.caches.samples
            kept = {node: [mark for mark in marks if samples(mark[1])] for node, marks in self._marks.items()}
            self._marks = {node: marks for node, marks in kept.items() if marks}

    def used(self, nodes: list[Node], clock: int) -> None:
        """A request uses this path, from the root down; each node has its new level."""
        if self._marks:
            for node in reversed(nodes):
                marks = self._marks.get(node)
                if marks is not None:
                    self._tell(node, marks, clock)

    def stored(self, node: Node, seals: bytes, clock: int) -> None:
        """Blocks with these seals were stored at the end of the run."""
        first, samples = node.num_blocks - len(seals) // SEAL_BYTES, self.caches.samples
        found = [
            (first + start // SEAL_BYTES, seals[start : start + SEAL_BYTES])
            for start in range(0, len(seals), SEAL_BYTES)
            if samples(seals[start : start + SEAL_BYTES])
        ]
        if found:
            # In their places may have been others, which were evicted.
            self._keep(node, [mark for mark in self._marks.pop(node, ()) if mark[0] < first] + found)
            self._tell(node, found, clock)

    def hinted(self, node: Node) -> None:
        """It has another level, though it is not used."""
        for place, seal in self._marks.get(node, ()):
            if place < node.num_blocks:
                self.caches.hinted(seal, node.level)

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` was cut off the front of `lower`."""
        marks = self._marks.pop(lower, None)
        if marks is not None:
            before = upper.num_blocks
            self._keep(upper, [mark for mark in marks if mark[0] < before])
            self._keep(lower, [(place - before, seal) for place, seal in marks if place >= before])

    def forget(self, node: Node) -> None:
        """The run is about to go. The small caches go on knowing its blocks."""
        self._marks.pop(node, None)

    def _keep(self, node: Node, marks: list[Mark]) -> None:
        if marks:
            self._marks[node] = marks

    def _tell(self, node: Node, marks: list[Mark], clock: int) -> None:
        for place, seal in reversed(marks):
            if place < node.num_blocks:
                self.caches.used(seal, node.level, clock)
