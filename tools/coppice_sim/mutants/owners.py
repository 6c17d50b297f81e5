"""What may go wrong where several schedulers share the workers; see `registry.py`."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from coppice.ids import SchedulerEpoch
from coppice_cache.core.recovery import ownership
from coppice_scheduler.core.kv_client import attachment
from coppice_sim.mutants.registry import Mutant, Patches
from coppice_sim.nemesis import FaultProfile
from coppice_worker.core.worker import WorkerCore


def _newest_plans() -> Patches:
    """A worker takes plans of whoever came last, whomever the cache service named."""

    def registered(self: WorkerCore, message: Any) -> bool:
        return original(self, replace(message, owner=SchedulerEpoch(0)))

    original = WorkerCore.registered
    return [(WorkerCore, "registered", registered)]


def _never_shared() -> Patches:
    """The first scheduler keeps all that it has."""
    return [(ownership, "_balance", lambda state, owned: None)]


def _never_left() -> Patches:
    """A scheduler that is asked for a worker goes on there."""
    return [(attachment, "leave_workers", lambda life, now_ns: [])]


_CALM = FaultProfile.absences()
# Schedulers open sessions to workers that they own alone, so that whole runs do not notice.
NEWEST_PLANS = Mutant("newest plans", "rule 1: plans of who gave the worker up", _newest_plans)
OWNERS = (
    Mutant("never shared", "O4: a scheduler has nothing to plan for", _never_shared, _CALM),
    Mutant("never left", "O4: a scheduler has nothing to plan for", _never_left, _CALM),
)
