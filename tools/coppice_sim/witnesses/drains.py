"""What the cache service does with workers that drain, by what they have said to it and not by its own flag.

Draining, Register(draining)   from then on no new lease is granted there, and nobody waits there for another's prefill,
                               or has blocks kept for a lease that it does not have; its owner is not asked for it; the
                               leases that it has stay
Register                       it takes new leases again, or for the first time
"""

from __future__ import annotations

from coppice.ids import WorkerEpoch, WorkerId
from coppice.messages.registration import Draining, FromWorker, Register
from coppice_cache.core.index import IndexCore
from coppice_cache.core.pool.reservations import ReservationKey
from coppice_cache.core.state.workers import Worker
from coppice_sim.base.environment import Record


class DrainWitness:
    """Of the core that is alive; one that starts anew has heard nothing."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._core: IndexCore | None = None
        self._since: dict[WorkerId, tuple[WorkerEpoch, int]] = {}  # under which epoch it drains, and since when

    def receives(self, core: IndexCore, worker_id: WorkerId, body: FromWorker, now_ns: int) -> None:
        """Have the core receive what a worker says, and look at what that changes. Raises MessageRefused."""
        self._look_at(core)
        before = core.state.workers.get(worker_id)
        leases = _live(before)
        num_waiting = 0 if before is None else before.flights.num_waiting
        num_owed = 0 if before is None else len(_owed_new_leases(core, before))
        core.receive_worker(worker_id, body, now_ns)
        worker = core.state.workers.get(worker_id)
        if isinstance(body, Register):
            self._registered(worker_id, None if worker is None else worker.epoch, body, now_ns)
        elif isinstance(body, Draining) and (worker is None or worker.epoch != body.worker_epoch):
            self._record.sometimes["drain of an epoch that is over"] += 1
        elif isinstance(body, Draining):
            if _live(worker) != leases:
                self._record.fail("drain", f"leases of {worker_id} ended when it said that it drains")
            if worker_id not in self._since:
                self._record.sometimes["drain"] += 1
                self._record.sometimes["drain where somebody waits"] += num_waiting > 0
                self._record.sometimes["drain where blocks are kept for somebody"] += num_owed > 0
                self._record.sometimes["drain where something runs"] += bool(leases)
            self._since.setdefault(worker_id, (body.worker_epoch, now_ns))

    def _registered(self, worker_id: WorkerId, epoch: WorkerEpoch | None, body: Register, now_ns: int) -> None:
        if epoch is None or not body.draining:
            self._record.sometimes["takes new leases again"] += self._since.pop(worker_id, None) is not None
        elif self._since.get(worker_id, (0, 0))[0] != epoch:
            self._since[worker_id] = epoch, now_ns
            self._record.sometimes["registered while it drains"] += 1

    def watch(self, core: IndexCore) -> None:
        """After each call of the core."""
        self._look_at(core)
        for worker_id, (epoch, since_ns) in tuple(self._since.items()):
            worker = core.state.workers.get(worker_id)
            if worker is None or worker.epoch != epoch:
                del self._since[worker_id]
                continue
            new = [lease for lease in worker.leases.values() if lease.granted_ns > since_ns and not lease.num_claimed]
            if new:
                self._record.fail("drain", f"{worker_id} drains and was granted {len(new)} new leases")
            if worker.flights.num_waiting:
                self._record.fail("drain", f"{worker.flights.num_waiting} wait at {worker_id}, which drains")
            if worker.yields:
                self._record.fail("drain", f"{worker_id} drains, and its owner is asked for it")
            if owed := _owed_new_leases(core, worker):
                self._record.fail("drain", f"{worker_id} drains and keeps blocks for {len(owed)} new leases")

    def _look_at(self, core: IndexCore) -> None:
        if core is not self._core:
            self._core = core
            self._since.clear()


def _owed_new_leases(core: IndexCore, worker: Worker) -> list[ReservationKey]:
    """Whom blocks are kept for that come back there, but for those who have a lease there already."""
    sessions = core.state.sessions
    return [
        (epoch, lease_id)
        for epoch, lease_id in worker.reservations.waiting
        if epoch not in sessions or sessions[epoch].workers.get(lease_id) is not worker
    ]


def _live(worker: Worker | None) -> set[int]:
    return set() if worker is None else {number for number, lease in worker.leases.items() if not lease.draining}
