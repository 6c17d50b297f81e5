"""Steps that mean nothing, computed before any request waits: they make kernels compile and memory grow.

All their rows lie in block 0, one over the other, so a pool of one block is enough and what they leave there is
zeroed afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coppice_worker.core.batch.plain_batch import packed_batch, rows_alike
from coppice_worker.core.batch.step_batch import LogitChanges, StepBatch, StepLimits

_LONG_CONTEXT = 4096  # tokens
_ROWS_IN_COMMON = 8
_ROWS_OF_JOINS = (4, 16, 64)  # with each fewer pieces of a context are joined at a time, by a kernel of its own
_CHANGES = LogitChanges(
    repetition=np.ones(1, np.float32),
    frequency=np.zeros(1, np.float32),
    presence=np.zeros(1, np.float32),
    token_rows=np.zeros(1, np.int64),
    token_ids=np.zeros(1, np.int64),
    is_output=np.ones(1, np.bool_),
    bias_rows=np.zeros(1, np.int64),
    bias_ids=np.zeros(1, np.int64),
    bias=np.zeros(1, np.float32),
)


def idle_step(new_tokens: Sequence[int], context_lens: Sequence[int], block_size: int, temperature: float) -> StepBatch:
    """A step of rows [S] that all sample, each with that many new tokens at the end of its context."""
    new, lens = np.array(new_tokens, np.int64), np.array(context_lens, np.int64)
    tables = np.zeros((len(new), -(-int(lens.max()) // block_size)), np.int32)
    return packed_batch(new, lens, tables, block_size, rows_alike(lens, temperature=temperature, top_p=0.9))


def largest_step(max_sequences: int, max_step_tokens: int, max_context: int, block_size: int) -> StepBatch:
    """As many tokens as a step may have, in as many rows as may sample."""
    num_rows = min(max_sequences, max_step_tokens)
    new = np.full(num_rows, max_step_tokens // num_rows)
    new[: max_step_tokens % num_rows] += 1
    new = np.minimum(new, max_context)
    return idle_step(new.tolist(), new.tolist(), block_size, temperature=1.0)


def warm_up_steps(block_size: int, limits: StepLimits, max_context: int) -> list[StepBatch]:
    """One of each kind: chunks, decodes, and both beside each other; greedy and drawn; a decode of changed logits. On a
    GPU, long contexts have kernels of their own (few chunks are cut along them, and rows have their beginning in
    common), and so have numbers of rows.
    """
    kinds = (([2], [2]), ([1], [3]), ([1, 1], [3, 3]), ([2, 1], [4, 3]))
    steps = [
        idle_step(new, lens, block_size, temperature)
        for new, lens in kinds
        for temperature in (0.0, 1.0)
        if _fits(new, lens, limits, max_context)
    ]
    long = min(max_context, _LONG_CONTEXT)
    decodes_of = ((_ROWS_IN_COMMON, long), *((rows, 3) for rows in _ROWS_OF_JOINS))
    others = [([2], [long]), *(([1] * rows, [length] * rows) for rows, length in decodes_of)]
    for new, lens in others:
        if _fits(new, lens, limits, max_context):
            steps.append(idle_step(new, lens, block_size, temperature=0.0))
    decodes = [idle_step([1], [3], block_size, temperature) for temperature in (0.0, 1.0)]
    # Logits that are changed are float32, for which there are kernels of their own.
    return steps + [replace(step, sample=replace(step.sample, changes=_CHANGES)) for step in decodes]


def _fits(new: Sequence[int], lens: Sequence[int], limits: StepLimits, max_context: int) -> bool:
    return len(new) <= limits.max_sequences and sum(new) <= limits.max_step_tokens and max(lens) <= max_context
