"""Sessions of schedulers and other clients: their leases, and the digest that both sides compare."""

from __future__ import annotations

from coppice.ids import CacheEpoch, LeaseId, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.cell import TenantSums
from coppice.messages.index import DeadWorker, LeaseDigest, lease_hash
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.state.workers import Worker

EPOCH_SHIFT = 32  # scheduler and worker epochs: the cache epoch that minted them, then a counter
FIRST_EPOCHS = 1 << 31  # the counter begins anywhere below, and has as many left


def minted_by(epoch: int) -> CacheEpoch:
    """Which cache epoch minted this scheduler or worker epoch."""
    return CacheEpoch(epoch >> EPOCH_SHIFT)


class Session:
    """One scheduler epoch. `claims` are leases of before a restart whose worker has not registered yet."""

    __slots__ = (
        "claims",
        "dead_workers",
        "digest",
        "draining",
        "epoch",
        "last_heard_ns",
        "leases",
        "may_yield",
        "planners_told",
        "plans",
        "reattached",
        "served",
        "vouchers",
        "waiting",
        "workers",
    )

    def __init__(
        self, epoch: SchedulerEpoch, now_ns: int, *, reattached: bool, plans: bool = True, may_yield: bool = True
    ) -> None:
        self.epoch = epoch
        self.last_heard_ns = now_ns
        self.plans = plans  # False: a client that is no scheduler and never asks a worker for anything
        self.may_yield = may_yield  # False: its build has never heard of owners
        self.reattached = reattached  # False: kept from an earlier cache epoch, its Reattach has not come yet
        self.dead_workers: frozenset[DeadWorker] = frozenset()  # it has given up what it had there
        self.leases: dict[LeaseId, Lease] = {}
        self.workers: dict[LeaseId, Worker] = {}
        self.claims: dict[LeaseId, WorkerId] = {}
        self.draining: set[LeaseId] = set()  # abandoned or dropped; their ids are not granted again before the fence
        self.waiting: dict[LeaseId, Worker] = {}  # answered with Pending: where the flight is
        self.vouchers: dict[tuple[WorkerId, WorkerEpoch], bytes] = {}  # for it, at each worker that it was listed
        self.served: dict[str, TenantSums] | None = None  # by tenant; None: it has said nothing yet
        self.planners_told: tuple[SchedulerEpoch, ...] = ()  # the others, as it heard last; () also if it heard nothing
        self.digest = 0

    @property
    def num_leases(self) -> int:
        return len(self.leases) + len(self.claims)

    @property
    def lease_digest(self) -> LeaseDigest:
        return LeaseDigest(self.num_leases, self.digest)

    def add(self, lease: Lease, worker: Worker) -> None:
        assert lease.lease_id not in self.leases
        self.leases[lease.lease_id] = lease
        self.workers[lease.lease_id] = worker
        self.digest ^= lease_hash(lease.lease_id)

    def remove(self, lease_id: LeaseId) -> None:
        del self.leases[lease_id]
        del self.workers[lease_id]
        self.digest ^= lease_hash(lease_id)

    def drain(self, lease_id: LeaseId) -> None:
        """It is over, and its id is not granted again before a fence has said that nothing writes its blocks."""
        self.remove(lease_id)
        self.draining.add(lease_id)

    def stop_waiting(self, lease_id: LeaseId) -> None:
        """It asks again, or never will."""
        worker = self.waiting.pop(lease_id, None)
        if worker is not None:
            worker.flights.forget(self.epoch, lease_id)

    def hold_claim(self, lease_id: LeaseId, worker_id: WorkerId) -> None:
        self.claims[lease_id] = worker_id
        self.digest ^= lease_hash(lease_id)

    def drop_claim(self, lease_id: LeaseId) -> None:
        del self.claims[lease_id]
        self.digest ^= lease_hash(lease_id)
