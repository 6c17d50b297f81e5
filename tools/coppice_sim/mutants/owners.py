"""What may go wrong where several schedulers share the workers; see `registry.py`."""

from __future__ import annotations

from typing import Any

from coppice.messages.registration import Registered
from coppice_cache.core.recovery import ownership
from coppice_scheduler.core.kv_client import attachment
from coppice_sim.mutants.registry import Mutant, Patches
from coppice_sim.nemesis import FaultProfile
from coppice_worker.core.worker import WorkerCore


def _newest_plans() -> Patches:
    """A worker takes plans of whoever came last, whomever the cache service named."""

    return [(WorkerCore, "_name_owner", lambda self, owner: None)]


def _owner_of_whoever() -> Patches:
    """A process that begins anew takes what was said to the one before it for its own registration."""

    def owned(self: WorkerCore, message: Any) -> None:
        if not self.worker_epoch:
            self.registered(Registered(message.worker_epoch, self._registered.cache_epoch, owner=message.owner))
        original(self, message)

    original = WorkerCore.owned
    return [(WorkerCore, "owned", owned)]


def _never_shared() -> Patches:
    """The first scheduler keeps all that it has."""
    return [(ownership, "_balance", lambda state, owned: None)]


def _never_left() -> Patches:
    """A scheduler that is asked for a worker goes on there."""
    return [(attachment, "leave_workers", lambda life, now_ns: [])]


_CALM = FaultProfile.absences()
# Schedulers open sessions to workers that they own alone, and a word to a process that has just begun is rare.
# Whole runs notice these seldom or never.
OWNERS_MASKED = (
    Mutant("newest plans", "rule 1: plans of who gave the worker up", _newest_plans),
    Mutant("owner of whoever", "I8: what is findable was never written", _owner_of_whoever),
)
OWNERS = (
    Mutant("never shared", "O4: a scheduler has nothing to plan for", _never_shared, _CALM),
    Mutant("never left", "O4: a scheduler has nothing to plan for", _never_left, _CALM),
)
