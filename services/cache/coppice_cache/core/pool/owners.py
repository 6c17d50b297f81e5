"""Which domain's account had each block last: an index per block into a table of accounts.

An account that was the last one of no block can be forgotten and its place used again, so the table grows with the
domains that left something behind, not with all that ever were.
"""

from __future__ import annotations

from array import array

import numpy as np

from coppice.ids import DomainId
from coppice_cache.core.base.settings import DomainConfig
from coppice_cache.core.pool.free_ring import Blocks
from coppice_cache.core.pool.quotas import DomainUse

# Stand-ins for the last domain of a block; no client can name either.
_NOBODY = DomainConfig(DomainId(""))  # never granted
_UNKNOWN = DomainConfig(DomainId("\0unknown"))  # granted by an earlier cache epoch
UNKNOWN_INDEX = 1
_SLACK = 64


class Owners:
    """`index` has one entry per block; `indices` is its numpy view, shape [num_blocks]."""

    __slots__ = ("_sweep_at", "_vacant", "index", "indices", "nobody", "unknown", "uses")

    def __init__(self, num_blocks: int) -> None:
        self.index = array("i", bytes(4 * num_blocks))
        self.indices = np.frombuffer(self.index, np.int32)
        self.nobody = DomainUse(_NOBODY, 0)
        self.unknown = DomainUse(_UNKNOWN, 0)
        self.unknown.owner_index = UNKNOWN_INDEX
        self.uses = [self.nobody, self.unknown]
        self._vacant: list[int] = []
        self._sweep_at = _SLACK

    def use_of(self, block: int) -> DomainUse:
        return self.uses[self.index[block]]

    def uses_of(self, blocks: Blocks) -> list[DomainUse]:
        """The accounts of these blocks, each once."""
        return [self.uses[index] for index in set(self.indices[blocks].tolist())]

    def index_of(self, use: DomainUse) -> int:
        """The place of an account in the table; it gets one when it has none."""
        index = use.owner_index
        if index < len(self.uses) and self.uses[index] is use:
            return index
        if not self._vacant and len(self.uses) >= self._sweep_at:
            self._sweep()
        if self._vacant:
            use.owner_index = self._vacant.pop()
            self.uses[use.owner_index] = use
        else:
            use.owner_index = len(self.uses)
            self.uses.append(use)
        return use.owner_index

    def _sweep(self) -> None:
        """Find the places that no block points to; the next sweep waits until the table has doubled."""
        counted = np.bincount(self.indices, minlength=len(self.uses))
        self._vacant = [index for index in np.flatnonzero(counted == 0).tolist() if index > UNKNOWN_INDEX]
        for index in self._vacant:
            self.uses[index] = self.nobody
        self._sweep_at = 2 * (len(self.uses) - len(self._vacant)) + _SLACK
