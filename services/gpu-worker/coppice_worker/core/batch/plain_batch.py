"""Batches that no plan asked for: of warm-up, and of measurements."""

from __future__ import annotations

import numpy as np

from coppice_worker.core.batch.step_batch import Int32, Int64, SampleRows, StepBatch


def rows_alike(positions: Int64, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> SampleRows:
    """The first R rows of a batch, whose tokens will take `positions` [R], all chosen in one way."""
    count = len(positions)
    return SampleRows(
        rows=np.arange(count, dtype=np.int32),
        temperature=np.full(count, temperature, np.float32),
        top_k=np.full(count, top_k, np.int32),
        top_p=np.full(count, top_p, np.float32),
        min_p=np.zeros(count, np.float32),
        seed=np.zeros(count, np.uint64),
        position=positions,
    )


def packed_batch(new: Int64, lens: Int64, tables: Int32, block_size: int, sample: SampleRows) -> StepBatch:
    """Rows with `new` [S] tokens, all 0, at the end of contexts of `lens` [S] in blocks of tables [S, W]."""
    starts = np.zeros(len(new) + 1, np.int32)
    np.cumsum(new, out=starts[1:])
    row = np.repeat(np.arange(len(new)), new)
    positions: Int64 = np.arange(starts[-1], dtype=np.int64) + (lens - new - starts[:-1])[row]
    return StepBatch(
        token_ids=np.zeros(len(positions), np.int64),
        positions=positions,
        slots=tables[row, positions // block_size].astype(np.int64) * block_size + positions % block_size,
        query_starts=starts,
        context_lens=lens.astype(np.int32),
        block_tables=tables,
        sample=sample,
    )
