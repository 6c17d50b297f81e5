"""Collects the log-probabilities of a plan's steps, sequence by sequence, for its result."""

from __future__ import annotations

import numpy as np

from coppice.ids import SequenceId
from coppice.messages.step import TokenLogprobs
from coppice_worker.core.batch.step_batch import Int32, Int64, Logprobs, StepBatch, StepOutput, UInt32


class LogprobCollector:
    """`take` after each step of a plan, in order; `give` when it is done."""

    def __init__(self) -> None:
        self._found: list[TokenLogprobs] = []  # prompts
        self._ids: UInt32 = np.zeros(0, np.uint32)
        self._num_top: Int32 = np.zeros(0, np.int32)
        self._first_positions: Int64 = np.zeros(0, np.int64)
        self._steps: list[Logprobs] = []

    def clear(self) -> None:
        self._found.clear()
        self._steps.clear()

    def take(self, batch: StepBatch, ids: UInt32, output: StepOutput) -> None:
        """`ids` [S] are the sequences of the batch's rows."""
        if batch.prompt is not None:
            found, prompt = output.prompt_logprobs, batch.prompt
            assert found is not None, "prompt tokens were to be reported"
            for index, row in enumerate(prompt.rows.tolist()):
                part = slice(int(prompt.row_starts[index]), int(prompt.row_starts[index + 1]))
                position, num_top = int(prompt.first_positions[index]), int(prompt.num_top[index])
                assert found.ranks is not None, "prompt tokens have ranks"
                ranks = found.ranks[part].astype("<u4").tobytes()
                self._found.append(
                    _pack(ids[row], position, num_top, found.chosen[part], found.top_ids[part], found.top[part], ranks)
                )
        if batch.sample.num_logprobs is not None:
            assert output.logprobs is not None, "sampled tokens were to be reported"
            if not self._steps:
                wanted = np.flatnonzero(batch.sample.num_logprobs >= 0)
                self._ids = ids[batch.sample.rows[wanted]]
                self._num_top = batch.sample.num_logprobs[wanted]
                self._first_positions = batch.sample.position[wanted]
            self._steps.append(output.logprobs)

    def give(self) -> tuple[TokenLogprobs, ...]:
        """One entry for each prompt chunk, and one for all the tokens that a sequence sampled in this plan."""
        found = self._found
        if self._steps:
            chosen = np.stack([step.chosen for step in self._steps], axis=1)
            top_ids = np.stack([step.top_ids for step in self._steps], axis=1)
            top = np.stack([step.top for step in self._steps], axis=1)
            found = found + [
                _pack(sequence_id, int(position), int(num_top), chosen[index], top_ids[index], top[index])
                for index, (sequence_id, position, num_top) in enumerate(
                    zip(self._ids, self._first_positions, self._num_top, strict=True)
                )
            ]
        return tuple(found)


def _pack(
    sequence_id: np.uint32,
    position: int,
    num_top: int,
    chosen: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    top_ids: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    top: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    ranks: bytes = b"",
) -> TokenLogprobs:
    """From arrays [T] and [T, at least num_top]; a vocabulary smaller than `num_top` has fewer columns."""
    num_top = min(num_top, top.shape[1])
    return TokenLogprobs(
        sequence_id=SequenceId(int(sequence_id)),
        first_position=position,
        num_top=num_top,
        chosen=chosen.astype("<f4").tobytes(),
        top_ids=top_ids[:, :num_top].astype("<u4").tobytes(),
        top=top[:, :num_top].astype("<f4").tobytes(),
        ranks=ranks,
    )
