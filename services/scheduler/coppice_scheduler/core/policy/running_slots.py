"""Who holds how many of the places for running requests, and who gives one up for whom.

When no place is free, the tenant that goes next may get one from the tenant that is furthest over its share of places,
if that is by more than an eighth of it: its latest request is preempted. What it computed stays findable, so little is
lost. Two kinds of tenants get one:

- all that it has at work would fit into its share of the places: it must not wait for those who flood
- it holds less than half of its share, and was served less by more than `MARGIN` requests: whoever holds the places
  does not give them back soon enough. Without the margin tenants whose fair service needs unequal numbers of places
  would take them from each other all the time.

That ends, and work gets on (I17). The giver held more than its share, so it is far from a claim of its own, and no
place goes back and forth while the same tenants want. No tenant gives its oldest request, which so runs to its end; and
no request gives way more than `YIELDS_MAX` times.

Strict tenants have places of their own (`slot_shares.py`): they take no part in it.
"""

from __future__ import annotations

from collections.abc import Iterable

from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.policy.virtual_time import Ranks
from coppice_scheduler.core.state.sequences import RequestState, Sequence
from coppice_scheduler.core.state.workers import Worker

YIELDS_MAX = 2
MARGIN = 2
# Of its share that a tenant may be over it without giving one up. With many places one comes free by itself soon, and
# tenants that all want their share are a few places over it and below it all the time.
GIVERS_SLACK = 1 / 8
EXCESS_SLACK = 1e-9


class RunningSlots:
    """Places held, running or asking, and fair shares of that number among the tenants at work that share them."""

    def __init__(self, life: Lifecycle) -> None:
        self._counts = life.counts
        self._shares = life.shares
        self._strict = life.slot_shares.strict
        at_work = self._strict and self._strict & life.counts.at_work()
        self._weight = life.shares.weight_at_work - sum(life.settings.limits_of(tenant).weight for tenant in at_work)

    def is_strict(self, number: int) -> bool:
        return self._shares.tenant(number) in self._strict

    def held(self, number: int) -> int:
        return self._counts.tenant_at_places(self._shares.tenant(number))

    def share(self, number: int) -> float:
        total = self._counts.running + self._counts.asking - sum(map(self._counts.tenant_at_places, self._strict))
        return total * self._shares.weight(number) / self._weight

    def excess(self, number: int) -> float:
        """Places beyond the tenant's share; negative where it has fewer. A strict tenant has just its own."""
        return 0.0 if self.is_strict(number) else self.held(number) - self.share(number)

    def fits_its_share(self, number: int) -> bool:
        return self._shares.num_at_work(number) <= self.share(number) + EXCESS_SLACK

    def is_short(self, number: int) -> bool:
        """It has less than half of its share, and would have no more than its share with one more."""
        share, held = self.share(number), self.held(number)
        return held < share / 2 and held + 1 <= share + EXCESS_SLACK

    def givers(self) -> list[int]:
        """Tenants well over their share, the one furthest over it first."""
        holders = map(self._shares.number_of, {**self._counts.tenant_running, **self._counts.tenant_asking})
        over = [(-self.excess(number), number) for number in holders if self._gives(number)]
        return [number for _, number in sorted(over)]

    def _gives(self, number: int) -> bool:
        return self.excess(number) > GIVERS_SLACK * self.share(number) + EXCESS_SLACK


def giving_way(life: Lifecycle, request: RequestState, ranks: Ranks, workers: Iterable[Worker]) -> Sequence | None:
    """Whose place on these workers the request may have; None: it is not due one, or nobody can give it."""
    running_slots = RunningSlots(life)
    number = request.tenant_number
    if running_slots.is_strict(number):
        return None
    bar = ranks.of(number)
    if not running_slots.fits_its_share(number):
        if not running_slots.is_short(number):
            return None
        bar += MARGIN * life.shares.price(number, request.num_tokens_max)
    givers = [giver for giver in running_slots.givers() if giver != number and ranks.of(giver) >= bar]
    if not givers:
        return None  # before all that run is looked at
    running: dict[int, list[RequestState]] = {}
    for worker in workers:
        for sequence in worker.running.values() if worker.usable else ():
            running.setdefault(sequence.request.tenant_number, []).append(sequence.request)
    for giver in givers:
        requests = sorted(running.get(giver, ()), key=lambda request: request.order)
        for latest in reversed(requests[1:]):
            if latest.num_yields < YIELDS_MAX:
                return latest.sequence
    return None
