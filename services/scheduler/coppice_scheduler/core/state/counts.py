"""How many requests are where, and what was done since the start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Totals:
    submitted: int = 0
    finished: int = 0
    preemptions: int = 0
    retries: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    steps: int = 0
    flight_waits: int = 0
    reclaims: int = 0


@dataclass(slots=True)
class Counts:
    """Requests by where they are, kept as they move. Those that ask or sleep are waiting, too."""

    running: int = 0
    waiting: int = 0
    asking: int = 0
    waiting_tokens: int = 0
    tenant_running: Counter[str] = field(default_factory=Counter)
    tenant_waiting: Counter[str] = field(default_factory=Counter)
    tenant_waiting_tokens: Counter[str] = field(default_factory=Counter)
    tenant_asking: Counter[str] = field(default_factory=Counter)
    tenant_sleeping: Counter[str] = field(default_factory=Counter)
    tenant_following: Counter[str] = field(default_factory=Counter)
    tenant_unseen: Counter[str] = field(default_factory=Counter)  # came since the last `advance`

    def enter_queue(self, tenant: str, num_tokens: int) -> None:
        self.waiting += 1
        self.waiting_tokens += num_tokens
        self.tenant_waiting[tenant] += 1
        self.tenant_waiting_tokens[tenant] += num_tokens

    def leave_queue(self, tenant: str, num_tokens: int) -> None:
        self.waiting -= 1
        self.waiting_tokens -= num_tokens
        decrement(self.tenant_waiting, tenant)
        decrement(self.tenant_waiting_tokens, tenant, num_tokens)

    def at_work(self) -> set[str]:
        """Tenants that have a request here."""
        return {*self.tenant_running, *self.tenant_waiting}

    def tenant_at_places(self, tenant: str) -> int:
        """Requests of a tenant that run, or ask for it."""
        return self.tenant_running[tenant] + self.tenant_asking[tenant]

    def tenant_queued(self, tenant: str) -> int:
        """Requests of a tenant that were looked at and found no place. On an idle worker nobody is queued."""
        others = self.tenant_asking[tenant] + self.tenant_sleeping[tenant] + self.tenant_unseen[tenant]
        others += self.tenant_following[tenant]
        return max(self.tenant_waiting[tenant] - others, 0)


def decrement(counter: Counter[str], key: str, amount: int = 1) -> None:
    counter[key] -= amount
    if not counter[key]:
        del counter[key]
