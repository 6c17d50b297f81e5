"""A lease: one request's claim on one worker.

    block table   | shared (matched) | published | own, writable                |
                  0            num_shared    num_settled              len(table)
    duplicates    blocks below num_settled whose content was already in the tree: still the lease's own
    node          deepest tree node of the settled part; the lease's pin sits there

A lease that came back after a restart of the cache has no place in a tree. What it claimed is `held`: findable by
nobody, and FREE after its last holder (rule 6). Such a lease may extend and release, not publish.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coppice.handles import BLOCKS_MAX, HANDLE_BYTES
from coppice.ids import LeaseId, Namespace, SchedulerEpoch
from coppice.messages.index import Extended, Grant
from coppice_cache.core.ledger import unpack_blocks
from coppice_cache.core.quotas import DomainUse
from coppice_cache.core.radix import Node, Tree

_NO_DUPLICATES: frozenset[int] = frozenset()
_HANDLE_MASK = BLOCKS_MAX - 1


@dataclass(slots=True, eq=False)
class Lease:
    """Mutable record; `number` is unique in this core and stands for the lease in pins and holder sets."""

    number: int
    lease_id: LeaseId
    epoch: SchedulerEpoch
    use: DomainUse
    namespace: Namespace
    node: Node
    table: bytearray  # handles of all blocks of the sequence, in order
    num_shared: int
    num_settled: int
    granted_ns: int
    grant: Grant
    tree: Tree | None = None  # None for a re-attached lease
    duplicates: set[int] | frozenset[int] = _NO_DUPLICATES  # indices within the table
    held: list[int] = field(default_factory=list)  # block ids that a re-attached lease shares with other holders
    last_extend: tuple[int, Extended] | None = None  # reserve_tokens and the answer that added blocks for it
    draining: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.table) // HANDLE_BYTES

    def handles(self, start: int, stop: int) -> bytes:
        return bytes(self.table[start * HANDLE_BYTES : stop * HANDLE_BYTES])

    def block(self, index: int) -> int:
        start = index * HANDLE_BYTES
        return int.from_bytes(self.table[start : start + HANDLE_BYTES], "little") & _HANDLE_MASK

    def own_blocks(self) -> list[int]:
        """Block ids that only this lease uses, in order of the table."""
        duplicates = [self.block(index) for index in sorted(self.duplicates)]
        return duplicates + unpack_blocks(self.table[self.num_settled * HANDLE_BYTES :])
