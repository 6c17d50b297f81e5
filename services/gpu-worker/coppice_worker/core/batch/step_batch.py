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
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from coppice_worker.core.batch.guides import Guided

Bool = npt.NDArray[np.bool_]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """What is done to the logits of R rows before anything else. Rows that want nothing stand in none of the lists."""

    repetition: Float32  # [R] 1 = off
    frequency: Float32  # [R] 0 = off
    presence: Float32  # [R] 0 = off
    token_rows: Int64  # [N] of R: whose token each of these is; the tokens that the penalties look at
    token_ids: Int64  # [N]
    is_output: Bool  # [N]
    bias_rows: Int64  # [B] of R
    bias_ids: Int64  # [B]
    bias: Float32  # [B] is added to these logits; -inf forbids


@dataclass(frozen=True, slots=True)
class SampleRows:
    """How to sample the R rows that need a token. All arrays have shape [R]."""

    rows: Int32  # index of the sequence row; its last new token's logits are sampled
    temperature: Float32  # 0 means greedy
    top_k: Int32  # 0 means off
    top_p: Float32  # 1.0 means off
    min_p: Float32  # 0 means off; least probability, as a share of the likeliest token's
    seed: UInt64  # per request; the token is a function of (seed, position, logits, changes), never of batch mates
    position: Int64  # position that the sampled token will take in its sequence
    changes: LogitChanges | None = None
    num_logprobs: Int32 | None = None  # likeliest tokens to report; -1 = report not even the sampled one
    guided: Guided | None = None  # rows that may not take every token; None: there are none


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """N tokens of P rows' prompts whose log-probabilities are to be reported."""

    rows: Int32  # [P] of S
    row_starts: Int64  # [P + 1] row i owns tokens [row_starts[i], row_starts[i + 1])
    first_positions: Int64  # [P] of the first of them in its sequence
    num_top: Int32  # [P] likeliest tokens to report beside each
    packed: Int64  # [N] of T: whose logits say the token's log-probability, i.e. the token before it
    token_ids: Int64  # [N]


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
    prompt: PromptTokens | None = None
    changed_tables: Int32 | None = None  # rows whose tables are not those of the previous batch; None: perhaps all
    follows: bool = False  # the tokens are those that the previous batch's rows, the same, sampled; `token_ids` is void

    def check(self) -> None:
        """Shapes agree; whoever built the batch got something wrong if not."""
        num_tokens, num_rows = self.token_ids.shape[0], self.context_lens.shape[0]
        assert num_tokens > 0, "a step without tokens has nothing to compute"
        assert self.positions.shape == self.slots.shape == (num_tokens,)
        assert self.query_starts.shape == (num_rows + 1,)
        assert self.query_starts[0] == 0
        assert self.query_starts[-1] == num_tokens
        new_tokens = np.diff(self.query_starts)
        assert (new_tokens > 0).all(), "every row of a step has new tokens"
        assert (self.context_lens >= new_tokens).all()
        assert self.block_tables.shape[0] == num_rows


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of N tokens and of the K likeliest tokens in their places, likeliest first."""

    chosen: Float32  # [N]
    top_ids: Int32  # [N, K]
    top: Float32  # [N, K]
    ranks: Int32 | None = None  # [N] of prompt tokens: how many tokens are at least as likely, itself among them


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one forward pass gave."""

    tokens: Int32  # [R], in the order of `batch.sample.rows`
    logprobs: Logprobs | None = None  # of those among them that want it, in their order
    prompt_logprobs: Logprobs | None = None  # of `batch.prompt`
    broken: Int32 | None = None  # of R: rows whose guides know no token any more; what they were given is void


NO_OUTPUT = StepOutput(np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Shape of a worker's physical pool."""

    num_blocks: int
    block_size: int  # tokens


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What no step exceeds."""

    max_sequences: int = 256  # rows
    max_step_tokens: int = 8192


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


class Pending(Protocol):
    """A step under way."""

    def wait(self) -> StepOutput: ...


@runtime_checkable
class AheadExecutor(Executor, Protocol):
    """An executor that can begin a step before the tokens of the one before it are known."""

    def runs_ahead(self, batch: StepBatch) -> bool:
        """Whether a batch that follows this one may be launched before this one was waited for."""

    def launch(self, batch: StepBatch) -> Pending:
        """Like `execute`, without waiting. At most one other step may be pending."""
