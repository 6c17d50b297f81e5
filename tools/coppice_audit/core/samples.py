"""What is kept of the trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coppice_audit.core.plan import Arm

CACHED_TOKENS = "usage.prompt_tokens_details.cached_tokens"
PROMPT_TOKENS = "usage.prompt_tokens"


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer. Times in seconds of one monotonic clock; `facts` is what it says beside its text, by name.

    `failure` says why there is no first token; empty when there is one. `retry_s` is what a refusal asks to wait.
    """

    sent_s: float
    first_s: float
    facts: Mapping[str, str]
    failure: str = ""
    retry_s: float | None = None

    @property
    def ttft_ms(self) -> float:
        return (self.first_s - self.sent_s) * 1e3


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured answer. `at_s` is the moment of sending, from the start of the audit."""

    arm: Arm
    at_s: float
    ttft_ms: float
    facts: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: no prompt and no id."""
        found: dict[str, Any] = {"arm": self.arm.name.lower(), "at_s": round(self.at_s, 4)}
        if not self.arm.is_faulty:
            found["ttft_ms"] = round(self.ttft_ms, 4)
        counts = {"prompt_tokens": PROMPT_TOKENS, "cached_tokens": CACHED_TOKENS}
        return found | {name: int(self.facts[key]) for name, key in counts.items() if self.facts.get(key, "").isdigit()}


@dataclass(slots=True)
class Samples:
    """Filled as the trials run. `places` are those of the prompt that was sent before, 0 for the first to answer."""

    measured: list[Sample] = field(default_factory=list)
    places: dict[Arm, list[int]] = field(default_factory=lambda: {Arm.ORDER_OWN: [], Arm.ORDER_VICTIM: []})
    failures: Counter[str] = field(default_factory=Counter)
    stopped: str = ""  # why not all trials were made

    def of(self, arm: Arm) -> list[Sample]:
        return [sample for sample in self.measured if sample.arm is arm]

    def ttft_ms(self, arm: Arm) -> list[float]:
        return [sample.ttft_ms for sample in self.measured if sample.arm is arm]

    @property
    def num_trials(self) -> int:
        """Those that told something."""
        return len(self.measured) + sum(map(len, self.places.values()))
