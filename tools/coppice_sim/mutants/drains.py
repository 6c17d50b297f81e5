"""What may go wrong where workers drain; see `registry.py`."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from coppice_cache.core import index
from coppice_cache.core.ops import grants, reclaim
from coppice_cache.core.recovery import ownership, registration
from coppice_scheduler.core.kv_client import acquires
from coppice_sim.mutants.registry import Mutant, Patches
from coppice_sim.nemesis import FaultProfile
from coppice_worker.core.worker import WorkerCore


def _granted_all_the_same() -> Patches:
    """The cache service leaves it to schedulers, who may not have heard of it yet, to ask elsewhere."""

    def placements(state: Any, op: Any, config: Any) -> Any:
        draining = [worker for worker in state.workers.values() if worker.draining]
        for worker in draining:
            worker.draining = False
        found = original(state, op, config)
        for worker in draining:
            worker.draining = True
        return found

    original = grants._placements
    return [(grants, "_placements", placements)]


def _waits_on() -> Patches:
    """Who waits for what another computes there waits on, for what it will not be granted."""

    def drains(state: Any, worker: Any, *, draining: bool) -> None:
        worker.draining = draining
        state.workers_changed = state.owners_changed = True
        if draining:
            reclaim.end_reservations_of_acquires(state, worker)

    return [(registration, "_take_draining", drains)]


def _kept_on() -> Patches:
    """Blocks are kept, and taken back from others, for leases that are not granted there."""
    return [(registration, "end_reservations_of_acquires", lambda state, worker: None)]


def _counts_in_full() -> Patches:
    """A worker that drains is as good a share as any other."""
    return [(ownership, "_share_of", lambda worker: worker.num_blocks)]


def _drain_ends_leases() -> Patches:
    """What runs there is taken away, where it was to end by itself."""

    def drain(state: Any, worker_id: Any, message: Any) -> None:
        original(state, worker_id, message)
        worker = state.workers.get(worker_id)
        for lease in tuple(worker.leases.values()) if worker is not None and worker.draining else ():
            if not lease.draining:
                reclaim.take_away(state, worker, lease)

    original = registration.drain
    return [(index, "drain", drain)]


def _said_once() -> Patches:
    """What was said under an epoch that is over is not said again."""
    return [(WorkerCore, "said_again", lambda self: None)]


def _forgotten_by_registrations() -> Patches:
    """A worker that registers again takes new leases, as far as the cache service knows."""

    def registers(self: WorkerCore) -> Any:
        return replace(original(self), draining=False)

    original = WorkerCore.registration
    return [(WorkerCore, "registration", registers)]


def _drains_for_ever() -> Patches:
    """A worker that takes requests again is not believed."""

    def drains(state: Any, worker: Any, *, draining: bool) -> None:
        original(state, worker, draining=draining or worker.draining)

    original = registration._take_draining
    return [(registration, "_take_draining", drains)]


def _schedulers_do_not_hear() -> Patches:
    """The cache service keeps it to itself."""

    def drains(state: Any, worker: Any, *, draining: bool) -> None:
        told = state.workers_changed
        original(state, worker, draining=draining)
        state.workers_changed = told

    original = registration._take_draining
    return [(registration, "_take_draining", drains)]


def _one_refusal_shuts_the_gate() -> Patches:
    """A fork is refused where its prompt is, and nobody asks any more for a while."""

    def ask(self: Any, request: Any, able: Any, ops: Any) -> None:
        original(self, request, able, ops)
        if ops:
            self.life.leases.leases[ops[-1].lease_id].names_all = True

    original = acquires._Round._ask
    return [(acquires._Round, "_ask", ask)]


_DRAINS = FaultProfile.draining()
DRAINS = (
    Mutant("granted where it drains", "a worker that is to end gets new leases", _granted_all_the_same, _DRAINS),
    Mutant("waits where it drains", "a wait for what is not granted there", _waits_on, _DRAINS),
    Mutant("kept where it drains", "blocks for whom nothing is granted there", _kept_on, _DRAINS),
    Mutant("drain counts in full", "O4: all workers of a scheduler drain", _counts_in_full, _DRAINS),
    Mutant("drain ends leases", "what runs is to end by itself", _drain_ends_leases, _DRAINS),
    Mutant("drain said once", "O4: the cache service does not know", _said_once, _DRAINS),
    Mutant("drain forgotten", "O4: the same, after a registration", _forgotten_by_registrations, _DRAINS),
    Mutant("drains for ever", "O4: a worker that nobody uses again", _drains_for_ever, _DRAINS),
    Mutant("drain kept secret", "O4: schedulers do not know", _schedulers_do_not_hear, _DRAINS),
)
# A gate opens again in time: whole runs are slower, and nobody notices.
DRAINS_MASKED = (Mutant("one refusal shuts the gate", "0047: a fork holds up everybody", _one_refusal_shuts_the_gate),)
