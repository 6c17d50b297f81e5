"""How places for running requests are shared out: a fixed part for each strict tenant, the rest for all others.

    part      of `max_running`, and of the sequences that a worker takes: by weight among all tenants that are
              configured, at least one. It depends on nobody's work, so a strict tenant never waits for another's.
    the rest  is what all other tenants share; nobody of them gets a place of a strict tenant, used or not

Where there are fewer places than strict tenants and one for the others, they have to wait for each other.
"""

from __future__ import annotations

from math import inf

from coppice_scheduler.core.state.settings import SchedulerSettings

ROUNDING = 1e-9


class SlotShares:
    """Worked out once for one tenants file."""

    def __init__(self, settings: SchedulerSettings) -> None:
        total_weight = sum(limits.weight for limits in settings.tenants.values())
        self._strict = {
            tenant: limits.weight / total_weight for tenant, limits in settings.tenants.items() if limits.is_strict
        }
        self.strict = frozenset(self._strict)

    def of(self, tenant: str | None, num_slots: float) -> float:
        """How many of so many places a strict tenant has; None: how many are left for the others."""
        if num_slots == inf or not self._strict:
            return num_slots
        if tenant is not None:
            return max(1, int(self._strict[tenant] * num_slots + ROUNDING))
        return max(1, num_slots - sum(self.of(strict, num_slots) for strict in self._strict))

    def group(self, tenant: str) -> str | None:
        """Whose places a tenant's requests take: its own, or those of all others together."""
        return tenant if tenant in self.strict else None
