"""Drives an `Executor` directly, without a plan or a pool ledger: block tables are drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from coppice_worker.core.batch.step_batch import Executor, SampleRows, StepBatch


@dataclass
class DrivenSequence:
    """Tokens so far and the blocks that hold (or will hold) their KV."""

    tokens: list[int]
    blocks: list[int]
    num_computed_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    sampled: list[int] = field(default_factory=list)


def build_batch(sequences: Sequence[DrivenSequence], new_tokens: Sequence[int], block_size: int) -> StepBatch:
    """One row per sequence with that many of its next tokens; rows that reach their last token are sampled."""
    starts = np.concatenate([[0], np.cumsum(new_tokens)]).astype(np.int32)
    positions = [
        np.arange(s.num_computed_tokens, s.num_computed_tokens + n) for s, n in zip(sequences, new_tokens, strict=True)
    ]
    tables = np.zeros((len(sequences), max(len(s.blocks) for s in sequences)), dtype=np.int32)
    for row, sequence in enumerate(sequences):
        tables[row, : len(sequence.blocks)] = sequence.blocks
    slots = [
        tables[row][p // block_size].astype(np.int64) * block_size + p % block_size for row, p in enumerate(positions)
    ]
    ends = [s.num_computed_tokens + n for s, n in zip(sequences, new_tokens, strict=True)]
    rows = [row for row, s in enumerate(sequences) if ends[row] == len(s.tokens)]
    return StepBatch(
        token_ids=np.concatenate(
            [np.array(s.tokens, dtype=np.int64)[p] for s, p in zip(sequences, positions, strict=True)]
        ),
        positions=np.concatenate(positions).astype(np.int64),
        slots=np.concatenate(slots),
        query_starts=starts,
        context_lens=np.array(ends, dtype=np.int32),
        block_tables=tables,
        sample=SampleRows(
            rows=np.array(rows, dtype=np.int32),
            temperature=np.array([sequences[r].temperature for r in rows], dtype=np.float32),
            top_k=np.array([sequences[r].top_k for r in rows], dtype=np.int32),
            top_p=np.array([sequences[r].top_p for r in rows], dtype=np.float32),
            min_p=np.zeros(len(rows), np.float32),
            seed=np.array([sequences[r].seed for r in rows], dtype=np.uint64),
            position=np.array([ends[r] for r in rows], dtype=np.int64),
        ),
    )


def allot_blocks(lengths: Sequence[int], block_size: int, num_blocks: int, rng: np.random.Generator) -> list[list[int]]:
    """Distinct random blocks for sequences of these final lengths."""
    order: npt.NDArray[np.int64] = rng.permutation(num_blocks)
    needs = [-(-length // block_size) for length in lengths]
    assert sum(needs) <= num_blocks
    bounds = np.cumsum([0, *needs])
    return [[int(block) for block in order[a:b]] for a, b in pairwise(bounds)]


def run_to_length(
    executor: Executor,
    sequences: Sequence[DrivenSequence],
    num_new: Sequence[int],
    *,
    chunk_max: int,
    rng: np.random.Generator,
) -> None:
    """Steps until each sequence has sampled its number of tokens. Chunk sizes, row order and who pauses are random."""
    while True:
        waiting = [i for i, s in enumerate(sequences) if len(s.sampled) < num_new[i]]
        if not waiting:
            return
        chosen = [i for i in rng.permutation(waiting) if rng.random() < 0.8] or waiting[:1]
        rows = [sequences[i] for i in chosen]
        chunks = [min(len(s.tokens) - s.num_computed_tokens, int(rng.integers(1, chunk_max + 1))) for s in rows]
        batch = build_batch(rows, chunks, executor.pool.block_size)
        tokens = executor.execute(batch).tokens
        for sequence, chunk in zip(rows, chunks, strict=True):
            sequence.num_computed_tokens += chunk
        for row, token in zip(batch.sample.rows, tokens, strict=True):
            rows[row].tokens.append(int(token))
            rows[row].sampled.append(int(token))
