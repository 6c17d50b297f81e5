"""What a token of a prompt and a copied block cost on this worker: the cache service weighs one against the other."""

from __future__ import annotations

from msgspec.structs import replace

from coppice.ids import TOKEN_BYTES
from coppice.messages.registration import CopiesDone
from coppice.messages.step import StepResult

CHUNK_TOKENS_MIN = 16  # of a step that says something: a smaller one is mostly what any step costs
NUM_UNUSUAL = 4  # at first: memory is touched for the first time, kernels are compiled
_NEW_PART = 1 / 8  # of a mean, that the newest value makes up
_US = 1_000
_U32_MAX = (1 << 32) - 1


class MeasuredCosts:
    """Means of late. Steps are noted on one thread, copies on another."""

    def __init__(self) -> None:
        self._token, self._block = _Mean(), _Mean()

    def computed(self, result: StepResult) -> None:
        """A step is done. One that mostly decodes says nothing: its time goes into weights, not into tokens."""
        num_sampled = len(result.sampled_tokens) // TOKEN_BYTES
        if result.num_tokens - num_sampled >= max(CHUNK_TOKENS_MIN, result.num_tokens // 2):
            self._token.note(result.duration_us * _US / result.num_tokens)

    def copied(self, num_blocks: int, duration_ns: int) -> None:
        self._block.note(duration_ns / num_blocks)

    def added_to(self, answer: CopiesDone) -> CopiesDone:
        return replace(answer, prefill_ns_per_token=self._token.said(), copy_ns_per_block=self._block.said())


class _Mean:
    def __init__(self) -> None:
        self._num_noted = 0
        self._mean = 0.0

    def note(self, value: float) -> None:
        self._num_noted += 1
        if self._num_noted > NUM_UNUSUAL:
            self._mean += (value - self._mean) * (_NEW_PART if self._mean else 1.0)

    def said(self) -> int:
        """0: not known yet."""
        return min(_U32_MAX, round(self._mean))
