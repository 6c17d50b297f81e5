"""What one step computes, as packed arrays, and the seam to whatever computes it.

    sequence rows      S rows, in the order in which their tokens are packed
    packed tokens      T = sum of the rows' new tokens; row i owns [query_starts[i], query_starts[i + 1])

      token_ids   |a b c|d|e f|        prefill chunks and decodes are the same thing:
      positions   |0 1 2|9|4 5|        a row has `new` tokens and, after them, `context_lens[i]` tokens of KV
      slots       |. . .|.|. .|        where each new token's KV goes: block_id * block_size + offset

The core builds a `StepBatch` from a plan; an `Executor` (torch on a device, or the KV-honest stand-in of the
simulator) writes the KV of the new tokens, attends over the block tables and samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """How to sample the R rows that need a token. All arrays have shape [R]."""

    rows: Int32  # index of the sequence row; its last new token's logits are sampled
    temperature: Float32  # 0 means greedy
    top_k: Int32  # 0 means off
    top_p: Float32  # 1.0 means off
    seed: UInt64  # per request; the token is a function of (seed, position, logits), never of batch mates
    position: Int64  # position that the sampled token will take in its sequence


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass over S sequence rows and T packed new tokens."""

    token_ids: Int64  # [T]
    positions: Int64  # [T]
    slots: Int64  # [T] block_id * block_size + offset
    query_starts: Int32  # [S + 1]
    context_lens: Int32  # [S] tokens of KV after this step's writes
    block_tables: Int32  # [S, W] block ids, rows padded with 0
    sample: SampleRows


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one forward pass gave."""

    tokens: Int32  # [R], in the order of `batch.sample.rows`


NO_OUTPUT = StepOutput(np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Shape of a worker's physical pool."""

    num_blocks: int
    block_size: int  # tokens


class Executor(Protocol):
    """Owns the physical blocks and computes steps, strictly in call order."""

    @property
    def pool(self) -> PoolSpec: ...

    def zero_blocks(self, block_ids: Int32) -> None:
        """Overwrite the KV of whole blocks with zeros (I15)."""

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        """Copy whole blocks, pairwise; src and dst have equal shape [N]."""

    def execute(self, batch: StepBatch) -> StepOutput:
        """Write KV, attend, sample."""
