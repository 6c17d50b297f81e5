"""A worker that computes nothing: it answers plans as a model would whose words are drawn."""

from __future__ import annotations

from random import Random

import numpy as np
from numpy.typing import NDArray

from coppice.messages.step import StepPlan, StepResult

EARLY_ENDS = 0.3  # share of the requests that end before their length


class SampledWorker:
    """Samples as a plan says, at random; now and then the stop token, where a request is to end early."""

    def __init__(self, random: Random, vocabulary: int, stop: int, stops_within: tuple[int, int]) -> None:
        """`stop`: the token that ends a request early, within so many steps, at least and at most."""
        self._random = random
        self._stop = stop
        self._stops_within = stops_within
        self._tokens = np.random.default_rng(3)
        self._vocabulary = vocabulary
        self._rows = self._counts = np.zeros(0, np.uint32)
        self._left: dict[int, int] = {}  # tokens until the last known one, by sequence that is in its prompt
        self._stops_at: dict[int, int] = {}  # step in which the sequence gets its stop token

    def result(self, plan: StepPlan) -> StepResult:
        for start in plan.attach:
            self._left[start.sequence_id] = len(start.tokens) // 4 - start.num_computed_tokens
            if self._random.random() < EARLY_ENDS:
                self._stops_at[start.sequence_id] = plan.step + self._random.randrange(*self._stops_within)
        if not plan.repeat_rows:
            self._rows = np.frombuffer(plan.rows, "<u4")
            self._counts = np.frombuffer(plan.row_tokens, "<u4")
        for sequence_id in np.frombuffer(plan.detach, "<u4").tolist():
            self._stops_at.pop(sequence_id, None)
        ids = self._rows[self._samples()]
        tokens = self._tokens.integers(1, self._vocabulary, len(ids), dtype=np.uint32)
        stopping = [row for row, step in self._stops_at.items() if step <= plan.step]
        tokens[np.isin(ids, stopping)] = self._stop
        return StepResult(
            plan.step,
            ids.astype("<u4").tobytes(),
            tokens.astype("<u4").tobytes(),
            num_tokens=int(self._counts.sum()),
            duration_us=20_000,
        )

    def _samples(self) -> NDArray[np.bool_]:
        """[R]: rows that reach the end of what is known."""
        samples = np.ones(len(self._rows), np.bool_)
        for row in np.flatnonzero(np.isin(self._rows, list(self._left))).tolist():
            sequence_id = int(self._rows[row])
            self._left[sequence_id] -= int(self._counts[row])
            samples[row] = not self._left[sequence_id]
            if samples[row]:
                del self._left[sequence_id]
        return samples
