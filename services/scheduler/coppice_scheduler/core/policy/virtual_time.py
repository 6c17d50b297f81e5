"""Whose turn it is: what each tenant was served, and what it will be by those that are in already."""

from __future__ import annotations

import numpy as np

from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.state.leases import LeaseState


class Ranks:
    """The tenant of the lowest rank goes next. Prefill that was let in and is not planned yet counts as served, or all
    places that come free at once would go to one tenant."""

    def __init__(self, life: Lifecycle) -> None:
        self._shares = life.shares
        count = life.shares.num_tenants
        pledged, held = np.zeros(count), np.zeros(count, np.int64)
        for worker in life.workers.values():
            numbers, num_tokens = worker.unplanned_prefill()
            held += np.bincount(numbers, minlength=count)
            pledged += np.bincount(numbers, weights=num_tokens, minlength=count)
        self._pledged: list[float] = pledged.tolist()  # tokens, by tenant
        self._held: list[int] = held.tolist()  # places
        if life.counts.asking:
            for lease_id, request in life.by_lease.items():
                lease = life.leases.leases[lease_id]
                if lease.state is LeaseState.ASKED:
                    self.took_place(request.tenant_number, lease.num_prefill_tokens)

    def took_place(self, number: int, num_tokens: int) -> None:
        """So much prefill of the tenant was let in."""
        self._held[number] += 1
        self._pledged[number] += num_tokens

    def gave_place(self, number: int, num_tokens: int) -> None:
        self._held[number] -= 1
        self._pledged[number] -= num_tokens

    def turn(self, number: int) -> tuple[float, int]:
        """Of two that were served alike the one with fewer places: whoever comes is lifted to be alike."""
        return self.of(number), self._held[number]

    def turns(self, numbers: list[int]) -> list[tuple[float, int]]:
        """The turn of each."""
        ranks = self._shares.counters_with(self._pledged)
        return [(ranks[number], self._held[number]) for number in numbers]

    def of(self, number: int) -> float:
        return self._shares.counter_with(number, self._pledged[number])
