"""Attaching, growing and detaching sequences: the only place where blocks get and lose users.

Order within a plan: copies and zeroing come before attaching on the device, yet which of them happen depends on which
sequences are accepted. So everything is checked first, and only blocks that an accepted sequence opened are zeroed or
copied into.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from coppice.handles import block_ids, epoch_in_era, epoch_of, generations, handles_array
from coppice.ids import CacheEpoch, LeaseId, SequenceId
from coppice.messages.step import Growth, Refusal, RefusalCode, SequenceStart, StepPlan
from coppice_worker.core.batch.step_batch import Int32, UInt64
from coppice_worker.core.blocks.pool import BlockPool, BlockRefusal, lease_words
from coppice_worker.core.sequences import SequenceTable

_NO_BLOCKS: Int32 = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class BlockWork:
    """Block ids to zero [Z], and pairs to copy [C], before the step computes."""

    zero: Int32
    copy_src: Int32
    copy_dst: Int32


@dataclass(slots=True)
class _Changes:
    """What one plan has done so far."""

    sources: dict[SequenceId, Int32]  # blocks that each fork copies
    opened: list[UInt64]
    copied: list[tuple[Int32, Int32]]  # blocks read, blocks written
    read: list[Int32]  # of the former those that no table has
    refusals: dict[SequenceId, Refusal]

    def refuse(self, sequence_id: SequenceId, code: RefusalCode, handle: int = 0) -> None:
        self.refusals[sequence_id] = Refusal(sequence_id, code, handle)


class Attacher:
    def __init__(self, pool: BlockPool, sequences: SequenceTable) -> None:
        self._pool = pool
        self._sequences = sequences
        self.cache_epoch = CacheEpoch(0)  # that the worker is registered with
        self.reading = _NO_BLOCKS  # sources of copies of the step that is outstanding, one entry for each reader

    def detach(self, sequence_id: SequenceId) -> None:
        """An unknown sequence is no error: it may have been refused."""
        if sequence_id not in self._sequences.slot_of:
            return
        slot = self._sequences.slot_of[sequence_id]
        self._pool.leave(self._sequences.blocks(slot), slot + 1)
        self._sequences.remove(sequence_id)

    def attach_and_grow(
        self,
        plan: StepPlan,
        refused: dict[SequenceId, Refusal],
        fenced_leases: Container[LeaseId],
        sources: dict[SequenceId, Int32],
        refusals: dict[SequenceId, Refusal],
    ) -> BlockWork:
        """Adds to `refusals`; sequences in `refused` stay so. `sources` are those of `copy_sources`."""
        changes = _Changes(sources, [], [], [], refusals)
        for start in plan.attach:
            if start.sequence_id in refused:
                refusals[start.sequence_id] = refused[start.sequence_id]
            elif start.lease_id in fenced_leases:
                changes.refuse(start.sequence_id, RefusalCode.FENCED)
            else:
                self._attach(start, changes)
        growing = [growth for growth in plan.grow if self._may_grow(growth, refused, changes)]
        if growing and not self._grow_all(growing, changes):
            for growth in growing:
                self._grow(growth, changes)
        self.reading = np.concatenate([_NO_BLOCKS, *changes.read])
        return self._block_work(plan, changes)

    def copies_are_done(self) -> None:
        """The step is over: others may write what it copied."""
        self._pool.read_no_more(self.reading)
        self.reading = _NO_BLOCKS

    def forget_users(self) -> None:
        self._pool.forget_users()
        self.reading = _NO_BLOCKS

    def _attach(self, start: SequenceStart, changes: _Changes) -> None:
        shared, owned = handles_array(start.shared), handles_array(start.owned)
        blocks = np.concatenate([block_ids(start.shared), block_ids(start.owned)])
        count = len(start.tokens) // 4
        table = self._sequences
        if table.is_full or count > table.max_context or len(blocks) > table.max_blocks:
            changes.refuse(start.sequence_id, RefusalCode.NOT_RESERVED)
            return
        if start.sampling.grammar and table.open_guide is None:
            changes.refuse(start.sequence_id, RefusalCode.GRAMMAR)
            return
        words = lease_words(start.lease_id)
        problem = (
            self._pool.why_not_read(shared, start.shared_seals)
            or self._pool.why_not_write(owned, words)
            or self._twice(blocks, np.concatenate([shared, owned]))
            or self._lost_source(start, changes)
        )
        if problem is not None:
            changes.refuse(start.sequence_id, problem.code, problem.handle)
            return
        slot = table.add(start)
        table.append_blocks(slot, blocks)
        table.num_shared[slot] = len(shared)
        self._pool.read(shared)
        self._pool.open(owned, words, slot + 1)
        changes.opened.append(owned)
        if start.copy_from:
            source = changes.sources[start.sequence_id]
            changes.copied.append((source, blocks[len(shared) : len(shared) + len(source)]))
        elif start.copy_source:
            self._pool.read(handles_array(start.copy_source))
            source = block_ids(start.copy_source)
            changes.read.append(source)
            changes.copied.append((source, blocks[len(shared) : len(shared) + 1]))

    def _may_grow(self, growth: Growth, refused: dict[SequenceId, Refusal], changes: _Changes) -> bool:
        """Refuses what can be refused without looking at blocks."""
        sequence_id = growth.sequence_id
        if sequence_id in changes.refusals:
            return False
        if sequence_id in refused:
            changes.refusals[sequence_id] = refused[sequence_id]
            return False
        slot = self._sequences.slot_of.get(sequence_id)
        if slot is None:
            changes.refuse(sequence_id, RefusalCode.UNKNOWN_SEQUENCE)
            return False
        if int(self._sequences.num_blocks[slot]) + len(growth.owned) // 8 > self._sequences.max_blocks:
            changes.refuse(sequence_id, RefusalCode.NOT_RESERVED)
            return False
        return True

    def _grow_all(self, growing: list[Growth], changes: _Changes) -> bool:
        """All growths of a plan with one check. False, and nothing done, when any of them has a problem."""
        slots = np.array([self._sequences.slot_of[growth.sequence_id] for growth in growing], np.int32)
        counts = [len(growth.owned) // 8 for growth in growing]
        packed = b"".join(growth.owned for growth in growing)
        handles, blocks = handles_array(packed), block_ids(packed)
        leases = np.repeat(np.stack([self._lease_words_of(int(slot)) for slot in slots]), counts, axis=0)
        if len(set(slots.tolist())) < len(slots) or len(np.unique(blocks)) < len(blocks):
            return False
        if self._pool.why_not_write(handles, leases) is not None:
            return False
        self._pool.open(handles, leases, np.repeat(slots + 1, counts))
        for slot, part in zip(slots.tolist(), np.split(blocks, np.cumsum(counts)[:-1]), strict=True):
            self._sequences.append_blocks(slot, part)
        changes.opened.append(handles)
        return True

    def _grow(self, growth: Growth, changes: _Changes) -> None:
        if not self._may_grow(growth, {}, changes):
            return
        slot = self._sequences.slot_of[growth.sequence_id]
        handles, blocks = handles_array(growth.owned), block_ids(growth.owned)
        words = self._lease_words_of(slot)
        problem = self._pool.why_not_write(handles, words) or self._twice(blocks, handles)
        if problem is not None:
            changes.refuse(growth.sequence_id, problem.code, problem.handle)
            return
        self._pool.open(handles, words, slot + 1)
        self._sequences.append_blocks(slot, blocks)
        changes.opened.append(handles)

    def _lease_words_of(self, slot: int) -> UInt64:
        lease = self._sequences.leases[slot]
        assert lease is not None
        return lease_words(lease)

    def _lost_source(self, start: SequenceStart, changes: _Changes) -> BlockRefusal | None:
        if start.copy_source:
            # A cache service that came later knows of what the lease owns and shares, not of what it was to copy.
            if epoch_of(generations(start.owned)[0]) != epoch_in_era(self.cache_epoch):
                return BlockRefusal(RefusalCode.LOST_SOURCE, int(handles_array(start.copy_source)[0]))
            problem = self._pool.why_not_read(handles_array(start.copy_source), start.copy_seal)
            return None if problem is None else BlockRefusal(RefusalCode.LOST_SOURCE, problem.handle)
        if not start.copy_from or start.sequence_id in changes.sources:
            return None
        return BlockRefusal(RefusalCode.LOST_SOURCE, 0)

    @staticmethod
    def _twice(blocks: Int32, handles: UInt64) -> BlockRefusal | None:
        """A block may stand once in a table."""
        first = np.unique(blocks, return_index=True)[1]
        if len(first) == len(blocks):
            return None
        again = np.setdiff1d(np.arange(len(blocks)), first)
        return BlockRefusal(RefusalCode.DOUBLE_GRANT, int(handles[again[0]]))

    @staticmethod
    def _block_work(plan: StepPlan, changes: _Changes) -> BlockWork:
        """Only blocks that this plan opened; a copied block needs no zeroing, all of it is overwritten."""
        opened = np.concatenate(changes.opened) if changes.opened else np.zeros(0, np.uint64)
        zero = handles_array(plan.zero)
        zeroed = block_ids(zero[np.isin(zero, opened)].tobytes())
        if not changes.copied:
            return BlockWork(zeroed, _NO_BLOCKS, _NO_BLOCKS)
        src, dst = (np.concatenate(blocks) for blocks in zip(*changes.copied, strict=True))
        return BlockWork(zeroed[~np.isin(zeroed, dst)], src, dst)
