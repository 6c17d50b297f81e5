"""Entries of a recovery log, and which of them count by what a worker has: those whose generation and seal are the
worker's, with all above them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.handles import BLOCK_BITS
from coppice_cache.core.pool.free_ring import Blocks
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.state.replay import Forest, Ints, ReplayCounts

Bool = npt.NDArray[np.bool_]


class Entries:
    """Which entries of a forest count, against the ledger of one tier of a worker."""

    def __init__(self, store: BlockStore, forest: Forest) -> None:
        self.store = store
        self.forest = forest
        self.blocks = np.where(forest.blocks < store.num_blocks, forest.blocks, 0)
        self.sizes = np.bincount(forest.node_of, minlength=len(forest.nodes))
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.node_tree = np.array(forest.node_tree, np.int64)
        self.trees = {(tree.domain, tree.namespace): index for index, tree in enumerate(forest.trees)}
        self.alive = np.zeros(len(forest.handles), np.bool_)
        self._of_block = np.full(store.num_blocks, -1, np.int64)

    def judge(self, good_trees: list[bool], counts: ReplayCounts) -> None:
        forest, ledger = self.forest, self.store.ledger
        same_generation = ledger.generations[self.blocks] == forest.handles >> np.uint64(BLOCK_BITS)
        same_generation &= forest.blocks < self.store.num_blocks
        same_seal = (ledger.seal_words[self.blocks] == forest.seals).all(axis=1)
        good_domain = np.array(good_trees, np.bool_)[self.node_tree][forest.node_of]
        good = judged(same_generation, same_seal) & good_domain
        self.alive = self._closed(good)
        self._of_block[self.blocks[self.alive]] = np.flatnonzero(self.alive)
        counts.refused_domain += int((~good_domain).sum())
        counts.refused_generation += int((good_domain & ~same_generation).sum())
        counts.refused_seal += int((good_domain & same_generation & ~same_seal).sum())
        counts.refused_parent += int((good & ~self.alive).sum())

    def forget(self, entries: Ints) -> None:
        """These and all that follows them."""
        good = self.alive.copy()
        good[entries] = False
        self.alive = self._closed(good)

    def of_blocks(self, blocks: Blocks) -> Ints:
        """Per block its entry that counts; -1 where there is none."""
        found = self._of_block[blocks]
        return np.where((found >= 0) & self.alive[found], found, -1)

    def num_alive(self, node: int) -> int:
        """How many blocks of a node count, from its start on."""
        return int(self.alive[self.starts[node] : self.starts[node] + self.sizes[node]].sum())

    def path(self, node: int, num_blocks: int) -> Ints:
        """The first `num_blocks` entries on the way from the root down to a node."""
        parts = []
        at = node
        while at >= 0:
            parts.append(np.arange(self.starts[at], self.starts[at] + self.sizes[at]))
            at = self.forest.node_parent[at]
        return np.concatenate(parts[::-1])[:num_blocks]

    def _closed(self, good: Bool) -> Bool:
        """Only what is good with everything above it (I11)."""
        alive = good.copy()
        if good.all():
            return alive
        ends = self.starts + self.sizes
        first_bad = ends.copy()
        bad = np.flatnonzero(~good)
        np.minimum.at(first_bad, self.forest.node_of[bad], bad)
        broken = (first_bad < ends).tolist()
        for node, parent in enumerate(self.forest.node_parent):
            if parent >= 0 and broken[parent]:
                broken[node] = True
                first_bad[node] = self.starts[node]
            if broken[node]:
                alive[first_bad[node] : ends[node]] = False
        return alive


def judged(same_generation: Bool, same_seal: Bool) -> Bool:
    """Whose turn it is and what is in it, both as the worker says."""
    return same_generation & same_seal
