"""What may be asked of sampling, in one place for REST, gRPC, the one-process engine and what a checkpoint says."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

LOGPROBS_MAX = 20  # likeliest tokens that a client can have reported beside a chosen one
LIKELY_MAX = 256  # that a worker reports: a beam search looks at more
CHOICES_MAX = 128  # `n` and `best_of`
BEAMS_MAX = 16  # of a beam search
COMPLETION_TOKENS = 16  # of a completion that names no `max_tokens`: OpenAI's default


class Range(NamedTuple):
    low: float
    high: float
    above_low: bool = False  # `low` itself is outside

    def holds(self, value: float) -> bool:
        """A NaN is in no range."""
        return self.low <= value <= self.high and not (self.above_low and value == self.low)

    def __str__(self) -> str:
        if self.above_low:
            return f"above {self.low:g} and at most {self.high:g}"
        return f"from {self.low:g} to {self.high:.15g}"


BIAS = Range(-100, 100)
LENGTH_PENALTY = Range(-10, 10)  # exponent of an answer's length, which its score is divided by
RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "temperature": Range(0, 2),  # 0: the likeliest token, always
        "top_p": Range(0, 1, above_low=True),
        "top_k": Range(-1, 2**31 - 1),  # -1 and 0: off
        "min_p": Range(0, 1),
        "frequency_penalty": Range(-2, 2),
        "presence_penalty": Range(-2, 2),
        "repetition_penalty": Range(0, 2, above_low=True),
    }
)
