"""From the rows of a plan to the packed arrays of one forward pass.

Two ways to the same batch: any rows, checked and laid out from scratch; and the rows of the previous step again with
one token each, where everything that cannot have changed (order, sampling parameters, block tables) is kept and only
the rows whose tables grew are copied anew.

A plan of several decode steps is checked once, for all the tokens that it will write; its later steps are the second
way without another look, as nothing is applied between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from coppice.ids import SequenceId
from coppice.messages.step import Refusal, RefusalCode
from coppice_worker.core.batch.sampling import ranges
from coppice_worker.core.batch.step_batch import Bool, Int32, Int64, SampleRows, StepBatch, UInt64
from coppice_worker.core.batch.steps import Rows
from coppice_worker.core.blocks.pool import BlockPool
from coppice_worker.core.sequences import SequenceTable

_TABLE_SLACK = 8  # columns; a table that grows by one block is rarely laid out anew

_NONE = np.zeros(0, np.int32)
NO_ROWS = Rows(_NONE, np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class Computation:
    """What a step computes; `sampled_ids` packs u32 ids in the order of `batch.sample.rows`."""

    batch: StepBatch | None
    rows: Rows
    sampled_ids: bytes


@dataclass(slots=True)
class _Layout:
    """Arrays of a decode step that stay the same while its rows do."""

    version: int
    slots: Int32
    sampled_ids: bytes
    ones: Int64
    query_starts: Int32
    tables: Int32
    sample: SampleRows


class RowBuilder:
    """Lays out rows; remembers the previous step's."""

    def __init__(self, sequences: SequenceTable, pool: BlockPool, block_size: int, max_step_tokens: int) -> None:
        self._sequences = sequences
        self._pool = pool
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._ids: list[SequenceId] = []
        self._layout: _Layout | None = None

    def forget(self) -> None:
        self._ids = []
        self._layout = None

    @property
    def previous(self) -> list[SequenceId]:
        return self._ids

    def repeat(self, num_steps: int) -> Computation | None:
        """The previous rows, `num_steps` times one token each; the first of these steps. None when something about
        the rows changed: then `build` says what."""
        layout, table = self._layout, self._sequences
        if layout is None or layout.version != table.version:
            return None
        if not self._may_write(layout.slots, layout.ones, num_steps)[0].all():
            return None
        return self._next(layout, self._refresh_tables(layout))

    def follow(self) -> Computation:
        """The previous rows again, one token each, that were found good before."""
        assert self._layout is not None
        return self._next(self._layout, _NONE)

    def ahead(self) -> StepBatch:
        """What `follow` will give once the previous rows were computed and their tokens are known. Not for rows whose
        tokens change what is sampled next."""
        assert self._layout is not None
        assert self._layout.sample.changes is None
        assert self._layout.sample.guided is None
        batch = self._next(self._layout, _NONE, num_ahead=1).batch
        assert batch is not None
        return replace(batch, follows=True)

    def _next(self, layout: _Layout, changed_tables: Int32 | None, num_ahead: int = 0) -> Computation:
        table = self._sequences
        assert layout.version == table.version
        slots = layout.slots
        start = table.num_computed[slots] + num_ahead
        blocks = table.tables[slots, start // self._block_size]
        sample = replace(layout.sample, position=start + 1)
        if sample.changes is not None:
            sample = replace(sample, changes=table.sampling.changes(slots, sample.position, table.tokens))
        if sample.guided is not None:
            sample = replace(sample, guided=table.sampling.guided(slots, sample.position, table.tokens))
        batch = StepBatch(
            token_ids=table.tokens[slots, start].astype(np.int64),
            positions=start,
            slots=blocks.astype(np.int64) * self._block_size + start % self._block_size,
            query_starts=layout.query_starts,
            context_lens=(start + 1).astype(np.int32),
            block_tables=layout.tables,
            sample=sample,
            changed_tables=changed_tables,
        )
        return Computation(batch, Rows(slots, layout.ones), layout.sampled_ids)

    def build(
        self,
        ids: list[SequenceId],
        new: Int64,
        num_steps: int,
        refused: dict[SequenceId, Refusal],
        refusals: dict[SequenceId, Refusal],
    ) -> Computation:
        """Rows `ids` with `new` [R] tokens each, the first of `num_steps`. Rows that may not run are added to
        `refusals`."""
        self._ids = ids
        slot_of = self._sequences.slot_of
        for sequence_id in ids:
            if sequence_id in refused:
                refusals[sequence_id] = refused[sequence_id]
            elif sequence_id not in slot_of and sequence_id not in refusals:
                refusals[sequence_id] = Refusal(sequence_id, RefusalCode.UNKNOWN_SEQUENCE, 0)
        kept = np.array([sequence_id not in refusals for sequence_id in ids], dtype=bool)
        slots = np.array([slot_of[sequence_id] for sequence_id in ids if sequence_id not in refusals], dtype=np.int32)
        new = new[kept]
        good = self._reserved(slots, new, num_steps, refusals) & self._has_guides(slots, new, refusals)
        slots, new = slots[good], new[good]
        if not len(slots):
            self._layout = None
            return Computation(None, NO_ROWS, b"")
        return self._lay_out(slots, new)

    def _reserved(self, slots: Int32, new: Int64, num_steps: int, refusals: dict[SequenceId, Refusal]) -> Bool:
        good, handles = self._may_write(slots, new, num_steps)
        for index in np.flatnonzero(~good):
            sequence_id = SequenceId(int(self._sequences.ids[slots[index]]))
            refusals[sequence_id] = Refusal(sequence_id, RefusalCode.NOT_RESERVED, int(handles[index]))
        return good

    def _has_guides(self, slots: Int32, new: Int64, refusals: dict[SequenceId, Refusal]) -> Bool:
        """Which rows can be sampled, where they need to be: nobody waits for another's grammar to be compiled."""
        table = self._sequences
        samples = table.num_computed[slots] + new == table.num_tokens[slots]
        waits = samples & table.sampling.awaits_guide(slots)
        for sequence_id in map(SequenceId, table.ids[slots[waits]].tolist()):
            refusals.setdefault(sequence_id, Refusal(sequence_id, RefusalCode.GRAMMAR_PENDING, 0))
        ready: Bool = ~waits
        return ready

    def _may_write(self, slots: Int32, new: Int64, num_steps: int) -> tuple[Bool, UInt64]:
        """Which rows write only tokens that are known, into blocks that are theirs, within the step's budget (I6).
        Beside it the handle [R] that is in the way, where one is. With several steps the first one must sample the
        token of the second, and so on."""
        table, size = self._sequences, self._block_size
        start = table.num_computed[slots]
        known, end = start + new, start + new + num_steps - 1
        good: Bool = (known == table.num_tokens[slots]) if num_steps > 1 else (known <= table.num_tokens[slots])
        good &= (end <= table.num_blocks[slots] * size) & (end <= table.max_context)
        good &= np.cumsum(new) <= self._max_step_tokens
        handles = np.zeros(len(slots), np.uint64)
        # Own blocks stand behind the shared ones, so the check is over the blocks that the new tokens touch.
        first, last = start // size, (end - 1) // size
        row, column = ranges(first, np.where(good, last + 1, first))
        blocks = table.tables[slots[row], column]
        foreign = self._pool.writer[blocks] != slots[row] + 1
        if foreign.any():
            good[row[foreign]] = False
            handles[row[foreign]] = self._pool.handles_of(blocks[foreign])
        return good, handles

    def _lay_out(self, slots: Int32, new: Int64) -> Computation:
        table, size = self._sequences, self._block_size
        start = table.num_computed[slots]
        end = start + new
        query_starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(new, out=query_starts[1:])
        row, positions = ranges(start, end)
        blocks = table.tables[slots[row], positions // size].astype(np.int64)
        rows = np.flatnonzero(end == table.num_tokens[slots]).astype(np.int32)
        sampled = slots[rows]
        batch = StepBatch(
            token_ids=table.tokens[slots[row], positions].astype(np.int64),
            positions=positions,
            slots=blocks * size + positions % size,
            query_starts=query_starts,
            context_lens=end.astype(np.int32),
            block_tables=self._tables(slots),
            sample=table.sampling.sample_rows(sampled, rows, end[rows], table.tokens),
            prompt=table.sampling.prompt_tokens(slots, start, end, query_starts, table.tokens),
        )
        sampled_ids = table.ids[sampled].astype("<u4", copy=False).tobytes()
        self._remember(slots, batch, sampled_ids)
        return Computation(batch, Rows(slots, new), sampled_ids)

    def _remember(self, slots: Int32, batch: StepBatch, sampled_ids: bytes) -> None:
        """Keep what a repetition needs. Only rows that all sampled can be repeated with one token each."""
        if len(batch.sample.rows) < len(slots):
            self._layout = None
            return
        count = len(slots)
        self._layout = _Layout(
            version=self._sequences.version,
            slots=slots,
            sampled_ids=sampled_ids,
            ones=np.ones(count, np.int64),
            query_starts=np.arange(count + 1, dtype=np.int32),
            tables=batch.block_tables,
            sample=batch.sample,
        )

    def _tables(self, slots: Int32) -> Int32:
        """Block tables of `slots`, columns beyond a sequence's own blocks are 0."""
        self._sequences.grown.clear()
        counts = self._sequences.num_blocks[slots]
        width = min(self._sequences.max_blocks, int(counts.max()) + _TABLE_SLACK)
        tables = self._sequences.tables[slots, :width]
        tables[np.arange(width) >= counts[:, None]] = 0
        return tables

    def _refresh_tables(self, layout: _Layout) -> Int32 | None:
        """Rows whose tables grew; None when all were laid out anew."""
        grown = self._sequences.grown
        if not grown:
            return _NONE
        counts = self._sequences.num_blocks[layout.slots]
        if int(counts.max()) > layout.tables.shape[1]:
            layout.tables = self._tables(layout.slots)
            return None
        changed = np.flatnonzero(np.isin(layout.slots, np.fromiter(grown, np.int32, len(grown)))).astype(np.int32)
        for index in changed.tolist():
            blocks = self._sequences.blocks(int(layout.slots[index]))
            layout.tables[index, : len(blocks)] = blocks
        grown.clear()
        return changed
