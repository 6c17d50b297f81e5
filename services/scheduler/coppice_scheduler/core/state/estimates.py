"""How fast tokens are served, as measured, and what follows for who has to wait.

    rate = tokens of steps / time in steps        both decayed over some 10 s of work, summed over the workers
    wait = tokens ahead in the tenant's line / (rate * its share by weight among those at work)

Tokens ahead are the prompts of its waiting requests and as many output tokens as its requests brought of late. Where
nothing was measured nothing is said.

    time until one of N requests at work has ended = time that its requests took of late / N
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

MEMORY_NS = 10_000_000_000
_NEW_PART = 1 / 8  # of a mean, that the newest value makes up


@dataclass(slots=True)
class ServiceRate:
    """Of one worker."""

    num_tokens: float = 0.0
    busy_ns: float = 0.0
    last_ns: int = 0  # when its last result came

    def step_done(self, planned_ns: int, now_ns: int, num_tokens: int) -> None:
        """A plan of `planned_ns` brought its result; before the one before it came it was not begun."""
        busy_ns = now_ns - max(planned_ns, self.last_ns)
        self.last_ns = now_ns
        if num_tokens <= 0 or busy_ns <= 0:
            return
        kept = exp(-busy_ns / MEMORY_NS)
        self.num_tokens = self.num_tokens * kept + num_tokens
        self.busy_ns = self.busy_ns * kept + busy_ns

    @property
    def tokens_per_s(self) -> float:
        """0: not known."""
        return self.num_tokens / self.busy_ns * 1e9 if self.busy_ns else 0.0


class RecentRequests:
    """What the requests of each tenant that were completed of late had: output tokens, and time from arrival to end."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._durations_ns: dict[str, float] = {}

    def ended(self, tenant: str, num_tokens: int, duration_ns: int | None) -> None:
        """A request was completed. None: it was a step of a call, which is measured as a whole."""
        _average(self._tokens, tenant, num_tokens)
        if duration_ns is not None:
            _average(self._durations_ns, tenant, duration_ns)

    def call_ended(self, tenant: str, duration_ns: int) -> None:
        """A call of many steps was completed."""
        _average(self._durations_ns, tenant, duration_ns)

    def num_tokens(self, tenant: str) -> float:
        """0: nothing was completed yet."""
        return self._tokens.get(tenant, 0.0)

    def duration_ns(self, tenant: str) -> float:
        """0: nothing was completed yet."""
        return self._durations_ns.get(tenant, 0.0)


def _average(means: dict[str, float], tenant: str, value: int) -> None:
    mean = means.get(tenant, float(value))
    means[tenant] = mean + _NEW_PART * (value - mean)
