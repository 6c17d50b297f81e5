"""Messages between a scheduler and a worker: a numbered plan out, a numbered result back.

A plan carries differences; the worker keeps tokens, block tables and sampling state per sequence. It is applied in
this order: detach -> seals -> copies and zeroing -> attach, grow -> compute. A row computes the next `num_tokens` of
its sequence; when that reaches the end of the tokens known to the worker, a token is sampled and appended there. So a
plan may be sent before the token that it feeds was seen by the scheduler. With `num_decode_steps` above 1 every row
computes one token, so many times over: each time it feeds what it sampled before.
"""

from __future__ import annotations

from enum import Enum

from coppice.ids import U32, U64, DomainId, LeaseId, SequenceId
from coppice.messages.record import Message, PackedF32, PackedHandles, PackedPairs, PackedSeals, PackedU32, Record

FLOAT_BYTES = 4  # of a packed f32
COPY_SOURCE_SINCE = 7  # protocol version that has `SequenceStart.copy_source`


class SamplingParams(Record, frozen=True):
    """How to choose tokens. Applied in this order: penalties, bias, `min_tokens`, grammar, temperature, min_p, top_k,
    top_p.

    Log-probabilities are those of the model, before any of it.
    """

    temperature: float = 1.0  # 0 = greedy
    top_k: U32 = 0  # 0 = off
    top_p: float = 1.0
    seed: U64 = 0  # 64 bits
    min_p: float = 0.0  # 0 = off; least probability, as a share of the likeliest token's
    frequency_penalty: float = 0.0  # per time that the output has the token
    presence_penalty: float = 0.0  # if the output has the token
    repetition_penalty: float = 1.0  # 1 = off; if prompt or output has the token
    logit_bias: PackedPairs = b""  # packed pairs: u32 token id, f32 added to its logit
    min_tokens: U32 = 0  # output tokens before which none of `stop_token_ids` is chosen
    stop_token_ids: PackedU32 = b""  # packed u32; the scheduler stops at them, here they only serve `min_tokens`
    num_logprobs: U32 | None = None  # likeliest tokens to report beside the chosen one; None = report nothing
    num_prompt_logprobs: U32 | None = None  # as `num_logprobs`, of the prompt's tokens from the second on
    grammar: str = ""  # that the output follows, as `coppice.grammar` takes it; empty = none


class SequenceStart(Record, frozen=True):
    """Attach a sequence: its block table is `shared` then `owned`."""

    sequence_id: SequenceId
    lease_id: LeaseId
    tokens: PackedU32  # u32, all tokens known so far (after a preemption: generated ones too)
    num_computed_tokens: U32  # = tokens covered by `shared`, or by the copy, too
    shared: PackedHandles
    shared_seals: PackedSeals
    owned: PackedHandles
    sampling: SamplingParams
    traceparent: str = ""  # W3C trace context of the request; empty = not traced
    num_prompt_tokens: U32 = 0  # of `tokens`; what follows is output. 0 = all
    domain: DomainId = DomainId("")  # nothing is copied from a sequence of another one
    # Where the KV of computed tokens beyond `shared` is copied from, into the first of `owned`: a sequence that this
    # session attached in an earlier plan; this one may detach it. 0 = nothing is copied.
    copy_from: SequenceId = SequenceId(0)
    request_id: str = ""  # where it has a grammar: what the worker logs of the sequence says it
    # One published block whose first tokens are those behind `shared`: it is copied into the first of `owned`.
    copy_source: PackedHandles = b""
    copy_seal: PackedSeals = b""


class Growth(Record, frozen=True):
    """More owned blocks at the end of a sequence's block table."""

    sequence_id: SequenceId
    owned: PackedHandles


class StepPlan(Message, frozen=True):
    step: U64  # 1, 2, 3 ... within (scheduler epoch, worker epoch)
    detach: PackedU32 = b""  # u32 sequence ids
    sealed: PackedHandles = b""  # handles of blocks that were published
    seals: PackedSeals = b""  # their seals
    zero: PackedHandles = b""  # handles
    attach: tuple[SequenceStart, ...] = ()
    grow: tuple[Growth, ...] = ()
    rows: PackedU32 = b""  # u32 sequence ids that compute in this step
    row_tokens: PackedU32 = b""  # u32, how many tokens each
    repeat_rows: bool = False  # the same rows as the previous plan, one token each; `rows` is empty then
    num_decode_steps: U32 = 1  # above 1: all rows have one token, sample, and own the blocks of all these steps


class RefusalCode(Enum):
    STALE = "stale"  # the block's generation is not the handle's
    WRONG_SEAL = "wrong_seal"
    DOUBLE_GRANT = "double_grant"  # a writable block that has a live user, or that is sealed
    UNKNOWN_SEQUENCE = "unknown_sequence"
    NOT_RESERVED = "not_reserved"  # the step would write outside the sequence's own blocks (I6)
    FENCED = "fenced"
    GRAMMAR_PENDING = "grammar_pending"  # it is still being compiled here; come again
    GRAMMAR = "grammar"  # it cannot be compiled or followed any further here; the step may have been computed
    # `copy_from` is gone, or has other tokens or another domain (I19); or `copy_source` is not what it was
    LOST_SOURCE = "lost_source"


class Refusal(Record, frozen=True):
    """One sequence is refused and stays so until it is detached. Nothing of it was touched in this step."""

    sequence_id: SequenceId
    code: RefusalCode
    handle: U64  # the offending handle, 0 where none


class TokenLogprobs(Record, frozen=True):
    """Log-probabilities of `len(chosen) / 4` consecutive tokens of one sequence, prompt or output."""

    sequence_id: SequenceId
    first_position: U32  # of the first of these tokens in the sequence
    num_top: U32
    chosen: PackedF32  # f32 [T], of the tokens that are there
    top_ids: PackedU32 = b""  # u32 [T, num_top], likeliest first
    top: PackedF32 = b""  # f32 [T, num_top]
    ranks: PackedU32 = b""  # u32 [T] of prompt tokens, else empty: how many tokens are at least as likely, from 1

    @property
    def end_position(self) -> int:
        """Behind the last of these tokens."""
        return self.first_position + len(self.chosen) // FLOAT_BYTES


class StepResult(Message, frozen=True):
    step: U64
    sampled_ids: PackedU32 = b""  # u32 [R] sequence ids
    sampled_tokens: PackedU32 = b""  # u32 [num_decode_steps, R]
    refusals: tuple[Refusal, ...] = ()
    num_tokens: U32 = 0  # tokens whose KV this step computed
    duration_us: U64 = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # of sequences that want them
