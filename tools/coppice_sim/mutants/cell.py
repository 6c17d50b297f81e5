"""What may go wrong where schedulers count for each other what tenants were served; see `registry.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coppice_scheduler.core.cell.elsewhere import Elsewhere
from coppice_scheduler.core.queue.limits import RateLimits
from coppice_scheduler.core.state.fairness import FairShares
from coppice_sim.mutants.registry import Mutant, Patches
from coppice_sim.nemesis import FaultProfile


def _not_counted() -> Patches:
    """What others served is heard and counts for nothing."""
    nothing = lambda self, *charged: None  # noqa: E731
    return [(FairShares, "charge_elsewhere", nothing), (RateLimits, "charge_elsewhere", nothing)]


def _counted_again() -> Patches:
    """After another attachment all that is said is taken for new."""

    def attached(self: Elsewhere, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        for planner in self._planners.values() if named["fresh"] else ():
            planner.sums[:, :4] = 0

    original = Elsewhere.attached
    return [(Elsewhere, "attached", attached)]


def _dead_at_work() -> Patches:
    """What a scheduler had at work stays when its session is over."""
    return [(Elsewhere, "_forget", lambda self, epoch: self._planners.pop(epoch))]


def _each_by_itself() -> Patches:
    """What is at work elsewhere is heard and counts for nothing."""
    return [(Elsewhere, "num_at_work", lambda self, number: 0)]


_RESTARTS = replace(FaultProfile.cache_restarts(), takeovers=5.0)
_DEATHS = replace(FaultProfile.restarts(), takeovers=5.0)
# Runs have no tenant that would see the difference: tests with two schedulers notice these.
CELL_MASKED = (
    Mutant("sums not counted", "a tenant at two schedulers has twice its share", _not_counted),
    Mutant("each by itself", "a tenant at two schedulers has its concurrency twice", _each_by_itself),
)
CELL = (
    Mutant("sums counted again", "tokens of others count twice", _counted_again, _RESTARTS),
    Mutant("dead at work", "O4: what is not at work counts against concurrency", _dead_at_work, _DEATHS),
)
