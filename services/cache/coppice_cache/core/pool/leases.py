"""A lease: one request's claim on one worker.

    block table   | shared (matched) | published | own, writable                |
                  0            num_shared    num_settled              len(table)
    duplicates    runs below num_settled whose content was already in the tree: still the lease's own
    node          deepest tree node of the settled part; the lease's pin sits there
    copy_node     the node of a copy source, pinned until the lease publishes past it or ends

A lease that came back after a restart of the cache holds all that it claimed (`held`): findable by nobody, and FREE
after the last holder (rule 6). When its worker opens it finds its place in the tree that was replayed, and what nobody
else holds becomes its own. What others hold too, and no tree knows, stays held; then it does not publish.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coppice.handles import BLOCKS_MAX, HANDLE_BYTES
from coppice.ids import LeaseId, Namespace, SchedulerEpoch
from coppice.messages.index import Extended, Grant
from coppice_cache.core.base.settings import Mode
from coppice_cache.core.eviction.policy import NO_HINT, ReuseHint
from coppice_cache.core.pool.free_ring import unpack_blocks
from coppice_cache.core.pool.quotas import Account
from coppice_cache.core.radix.tree import Node, Tree

_HANDLE_MASK = BLOCKS_MAX - 1


@dataclass(slots=True, eq=False)
class Lease:
    """Mutable record; `number` is unique in this core and stands for the lease in pins and holder sets."""

    number: int
    lease_id: LeaseId
    epoch: SchedulerEpoch
    account: Account
    namespace: Namespace
    node: Node
    table: bytearray  # handles of all blocks of the sequence, in order
    num_shared: int
    num_settled: int
    granted_ns: int
    grant: Grant
    tree: Tree | None = None  # None for a re-attached lease that has no place in one
    duplicates: tuple[tuple[int, int], ...] = ()  # [start, stop) within the table, ascending, apart from each other
    held: list[int] = field(default_factory=list)  # block ids that a re-attached lease shares with other holders
    num_claimed: int = 0  # blocks of the table that it came back with; the worker may have sealed them
    last_extend: tuple[int, Extended] | None = None  # reserve_tokens and the answer that added blocks for it
    draining: bool = False
    hint: ReuseHint = NO_HINT  # as its acquire said
    copy_node: Node | None = None  # pinned too: its first block is the copy source that the grant named

    @property
    def may_publish(self) -> bool:
        """It has a place in a tree, and holds nothing there that the tree does not know."""
        return self.tree is not None and not self.held and self.account.config.mode is not Mode.DISABLED

    @property
    def num_blocks(self) -> int:
        return len(self.table) // HANDLE_BYTES

    def handles(self, start: int, stop: int) -> bytes:
        return bytes(self.table[start * HANDLE_BYTES : stop * HANDLE_BYTES])

    def block(self, index: int) -> int:
        start = index * HANDLE_BYTES
        return int.from_bytes(self.table[start : start + HANDLE_BYTES], "little") & _HANDLE_MASK

    def own_handles(self) -> bytes:
        """Handles of the blocks that only this lease uses, in order of the table."""
        start = max(self.num_settled, self.num_claimed) if self.held else self.num_settled
        unsettled = bytes(self.table[start * HANDLE_BYTES :])
        if not self.duplicates:
            return unsettled
        return b"".join([*(self.handles(start, stop) for start, stop in self.duplicates), unsettled])

    def own_blocks(self) -> list[int]:
        """The same as block ids."""
        return unpack_blocks(self.own_handles())

    def add_duplicates(self, start: int, stop: int) -> None:
        """The next blocks to be settled are in the tree already."""
        if self.duplicates and self.duplicates[-1][1] == start:
            start = self.duplicates[-1][0]
            self.duplicates = self.duplicates[:-1]
        self.duplicates = (*self.duplicates, (start, stop))

    def published_handles(self, start: int, stop: int) -> bytes:
        """Handles within [start, stop), all of them settled, of the lease's own blocks that the tree holds."""
        runs, start = [], max(start, self.num_shared)
        for first, last in self.duplicates:
            if start < stop and first < stop and last > start:
                runs.append(self.handles(start, max(start, first)))
                start = last
        return b"".join([*runs, self.handles(start, max(start, stop))])
