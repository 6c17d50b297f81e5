"""Whether one more request may wait: a share of the queue for each tenant, and what nobody uses for whoever comes.

    share    of `max_queued` and `max_queued_tokens`, by weight among all tenants that are configured: it is constant
    within   who stays within its share always passes, however much the others have waiting; so does a tenant's only one
    beyond   what is free of the whole queue without the shares of strict tenants, and without what these have waiting
    strict   never beyond: its answers depend on its own requests alone, and no answer of others depends on them

So the queue holds at most twice its maximum, and one request of each tenant: others filled it before the tenants with a
share came. A tenant that is not configured has no share.
"""

from __future__ import annotations

from typing import NamedTuple

from coppice_scheduler.core.state.counts import Counts
from coppice_scheduler.core.state.settings import SchedulerSettings


class Amount(NamedTuple):
    """Requests that wait, and the tokens of them all."""

    requests: int
    tokens: int

    def and_one_of(self, num_tokens: int) -> Amount:
        return Amount(self.requests + 1, self.tokens + num_tokens)

    def without(self, other: Amount) -> Amount:
        return Amount(self.requests - other.requests, self.tokens - other.tokens)

    def is_within(self, other: Amount) -> bool:
        return self.requests <= other.requests and self.tokens <= other.tokens


class QueueRoom:
    """The shares, worked out once. What waits is asked of `counts` and never changed."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.whole = Amount(settings.max_queued, settings.max_queued_tokens)
        total_weight = sum(limits.weight for limits in settings.tenants.values())
        self._shares = {
            tenant: Amount(*(int(amount * limits.weight / total_weight) for amount in self.whole))
            for tenant, limits in settings.tenants.items()
        }
        self._strict = frozenset(tenant for tenant, limits in settings.tenants.items() if limits.is_strict)
        self._common = self.whole
        for tenant in self._strict:
            self._common = self._common.without(self._shares[tenant])

    def share_of(self, tenant: str) -> Amount:
        return self._shares.get(tenant, Amount(0, 0))

    def has_room(self, tenant: str, num_tokens: int, counts: Counts) -> bool:
        """May this tenant have one more request waiting, of so many tokens?"""
        own = _waiting(tenant, counts)
        if tenant in self._shares and not own.requests:
            return True
        if own.and_one_of(num_tokens).is_within(self.share_of(tenant)):
            return True
        if tenant in self._strict:
            return False
        others = Amount(counts.waiting, counts.waiting_tokens)
        for strict in self._strict:
            others = others.without(_waiting(strict, counts))
        return others.and_one_of(num_tokens).is_within(self._common)


def _waiting(tenant: str, counts: Counts) -> Amount:
    return Amount(counts.tenant_waiting[tenant], counts.tenant_waiting_tokens[tenant])
