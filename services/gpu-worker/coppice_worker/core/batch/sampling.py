"""How each sequence wants its tokens chosen and reported, one slot each, and the rows of a step that follow from it.

Penalties look at a sequence's own tokens: everything in the table, of which the first `num_prompt` are the prompt,
also where the rest was generated before a preemption. Rows that want none of it cost nothing: `LogitChanges` and
`PromptTokens` name only those that do.

    position         | 0 . . . . . . | . . . . |        logits at position p are those of the token at p + 1
    tokens           | prompt        | output  |
    frequency, presence                ^^^^^^^
    repetition         ^^^^^^^^^^^^^^^ ^^^^^^^
"""

from __future__ import annotations

import numpy as np

from coppice.messages.step import SamplingParams
from coppice_worker.core.batch.guides import Guide, Guided
from coppice_worker.core.batch.step_batch import (
    Bool,
    Float32,
    Int32,
    Int64,
    LogitChanges,
    PromptTokens,
    SampleRows,
    UInt32,
    UInt64,
)

_BIAS_PAIR = np.dtype([("token", "<u4"), ("bias", "<f4")])
_NO_BIAS = np.zeros(0, _BIAS_PAIR)
_FORBIDDEN = np.float32("-inf")


class SamplingTable:
    """Per-slot arrays [max_sequences]."""

    def __init__(self, max_sequences: int) -> None:
        self._temperature: Float32 = np.zeros(max_sequences, np.float32)
        self._top_k: Int32 = np.zeros(max_sequences, np.int32)
        self._top_p: Float32 = np.ones(max_sequences, np.float32)
        self._min_p: Float32 = np.zeros(max_sequences, np.float32)
        self._seed: UInt64 = np.zeros(max_sequences, np.uint64)
        self._frequency: Float32 = np.zeros(max_sequences, np.float32)
        self._presence: Float32 = np.zeros(max_sequences, np.float32)
        self._repetition: Float32 = np.ones(max_sequences, np.float32)
        self._penalises: Bool = np.zeros(max_sequences, np.bool_)
        self._has_bias: Bool = np.zeros(max_sequences, np.bool_)
        self._bias = [_NO_BIAS] * max_sequences
        self._num_prompt: Int64 = np.zeros(max_sequences, np.int64)
        self._min_tokens: Int64 = np.zeros(max_sequences, np.int64)  # 0 without stop tokens
        self._stops = [_NO_BIAS] * max_sequences  # stop tokens, each with the bias that forbids it
        self._num_logprobs: Int32 = np.full(max_sequences, -1, np.int32)  # -1 = report nothing
        self._num_prompt_logprobs: Int32 = np.full(max_sequences, -1, np.int32)
        self._guides: list[Guide | None] = [None] * max_sequences
        self._is_guided: Bool = np.zeros(max_sequences, np.bool_)

    def put(self, slot: int, wanted: SamplingParams, num_prompt: int, guide: Guide | None = None) -> None:
        """`guide` says which tokens may come next, where a grammar is wanted."""
        self._temperature[slot] = wanted.temperature
        self._top_k[slot] = wanted.top_k
        self._top_p[slot] = wanted.top_p
        self._min_p[slot] = wanted.min_p
        self._seed[slot] = np.uint64(wanted.seed & (2**64 - 1))
        self._frequency[slot] = wanted.frequency_penalty
        self._presence[slot] = wanted.presence_penalty
        self._repetition[slot] = wanted.repetition_penalty
        self._penalises[slot] = (
            wanted.frequency_penalty != 0 or wanted.presence_penalty != 0 or wanted.repetition_penalty != 1
        )
        self._bias[slot] = np.frombuffer(wanted.logit_bias, _BIAS_PAIR)
        self._num_prompt[slot] = num_prompt
        self._min_tokens[slot] = wanted.min_tokens if wanted.stop_token_ids else 0
        self._stops[slot] = _forbid(wanted.stop_token_ids)
        self._has_bias[slot] = bool(wanted.logit_bias) or self._min_tokens[slot] > 0
        self._num_logprobs[slot] = -1 if wanted.num_logprobs is None else wanted.num_logprobs
        self._num_prompt_logprobs[slot] = -1 if wanted.num_prompt_logprobs is None else wanted.num_prompt_logprobs
        self._guides[slot] = guide
        self._is_guided[slot] = guide is not None

    def drop(self, slot: int) -> None:
        """Nobody is there any more."""
        self._guides[slot] = None

    def sample_rows(self, slots: Int32, rows: Int32, position: Int64, tokens: UInt32) -> SampleRows:
        """For the R sequences `slots`, which are `rows` of the step and of which `position` tokens are known.

        `tokens` [max_sequences, ...] holds them.
        """
        num_logprobs = self._num_logprobs[slots]
        return SampleRows(
            rows=rows,
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seed=self._seed[slots],
            position=position,
            changes=self.changes(slots, position, tokens),
            num_logprobs=num_logprobs if (num_logprobs >= 0).any() else None,
            guided=self.guided(slots, position, tokens),
        )

    def awaits_guide(self, slots: Int32) -> Bool:
        """[R] whose grammars are still being compiled."""
        waits = self._is_guided[slots]
        for row in np.flatnonzero(waits).tolist():
            guide = self._guides[slots[row]]
            waits[row] = guide is not None and not guide.is_ready
        return waits

    def guided(self, slots: Int32, position: Int64, tokens: UInt32) -> Guided | None:
        """None where no grammar is wanted."""
        is_guided = self._is_guided[slots]
        if not is_guided.any():
            return None
        rows = np.flatnonzero(is_guided).astype(np.int32)
        guides, outputs = [], []
        for slot, end in zip(slots[rows].tolist(), position[rows].tolist(), strict=True):
            guide = self._guides[slot]
            assert guide is not None
            guides.append(guide)
            outputs.append(tokens[slot, self._num_prompt[slot] : end])
        return Guided(rows, tuple(guides), tuple(outputs))

    def changes(self, slots: Int32, position: Int64, tokens: UInt32) -> LogitChanges | None:
        """None where none of these sequences will ever want a change."""
        penalises, has_bias = self._penalises[slots], self._has_bias[slots]
        if not (penalises | has_bias).any():
            return None
        num_prompt = self._num_prompt[slots]
        # Only the repetition penalty looks at the prompt.
        first = np.where(self._repetition[slots] != 1, 0, num_prompt)
        token_rows, columns = ranges(first, np.where(penalises, position, first))
        pairs = [_NO_BIAS]
        pair_rows = [0]
        for row in np.flatnonzero(has_bias).tolist():
            slot = slots[row]
            pairs.append(self._bias[slot])
            pair_rows.append(row)
            if position[row] - num_prompt[row] < self._min_tokens[slot]:
                pairs.append(self._stops[slot])
                pair_rows.append(row)
        biased = np.concatenate(pairs)
        return LogitChanges(
            repetition=self._repetition[slots],
            frequency=self._frequency[slots],
            presence=self._presence[slots],
            token_rows=token_rows,
            token_ids=tokens[slots[token_rows], columns].astype(np.int64),
            is_output=columns >= num_prompt[token_rows],
            bias_rows=np.repeat(np.array(pair_rows, np.int64), [len(part) for part in pairs]),
            bias_ids=biased["token"].astype(np.int64),
            bias=biased["bias"].astype(np.float32),
        )

    def prompt_tokens(
        self, slots: Int32, start: Int64, end: Int64, query_starts: Int32, tokens: UInt32
    ) -> PromptTokens | None:
        """What the rows `slots` [S], which compute positions [start, end), have to report of their prompts."""
        num_top = self._num_prompt_logprobs[slots]
        wanted = num_top >= 0
        if not wanted.any():
            return None
        last = np.where(wanted, np.minimum(end, self._num_prompt[slots] - 1), start)
        rows = np.flatnonzero(last > start)
        if not len(rows):
            return None
        row, before = ranges(start[rows], last[rows])
        row_starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum((last - start)[rows], out=row_starts[1:])
        return PromptTokens(
            rows=rows.astype(np.int32),
            row_starts=row_starts,
            first_positions=start[rows] + 1,
            num_top=num_top[rows],
            packed=query_starts[rows[row]] + before - start[rows[row]],
            token_ids=tokens[slots[rows[row]], before + 1].astype(np.int64),
        )


def ranges(first: Int64, end: Int64) -> tuple[Int64, Int64]:
    """Every number of the ranges [first, end), and which range it is from; both [sum of the lengths]."""
    lengths = np.maximum(end - first, 0)
    which = np.repeat(np.arange(len(lengths)), lengths)
    numbers: Int64 = np.arange(len(which)) - (np.cumsum(lengths) - lengths - first)[which]
    return which, numbers


def _forbid(tokens: bytes) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    ids = np.frombuffer(tokens, "<u4")
    pairs = np.zeros(len(ids), _BIAS_PAIR)
    pairs["token"], pairs["bias"] = ids, _FORBIDDEN
    return pairs
