"""I3 within a domain: what was computed under one salt is read under no other.

Followed by handles, from the lease that was granted a block to write, through copies between the tiers, to the leases
that share it; so it rests on nothing that the cores make of a salt.
"""

from __future__ import annotations

from coppice.handles import handles_array, pack_handle
from coppice.ids import BlockId, Generation, LeaseId, WorkerEpoch, WorkerId
from coppice.messages.index import Extended, Grant
from coppice.messages.registration import CopyOrders, Direction
from coppice_cache.core.base.events import Tier
from coppice_sim.base.environment import Record
from coppice_worker.core.worker import WorkerCore

_WAYS = {
    Direction.DEMOTE: (Tier.DEVICE, Tier.HOST),
    Direction.PROMOTE: (Tier.HOST, Tier.DEVICE),
    Direction.STORE: (Tier.HOST, Tier.DISK),
    Direction.LOAD: (Tier.DISK, Tier.HOST),
}


class SaltWitness:
    """Knows the salt of every lease, as its request has it, and of every block that was granted."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._of_lease: dict[LeaseId, bytes] = {}
        self._of_handle: dict[tuple[WorkerId, WorkerEpoch, Tier, int], bytes] = {}

    def asked(self, lease: LeaseId, salt: bytes) -> None:
        self._of_lease[lease] = salt

    def granted(self, worker_id: WorkerId, epoch: WorkerEpoch, answer: Grant | Extended) -> None:
        own = self._of_lease[answer.lease_id]
        if isinstance(answer, Grant):
            for handle in handles_array(answer.shared + answer.copy_source).tolist():
                self._read((worker_id, epoch, Tier.DEVICE, handle), own, f"shared by {answer.lease_id.hex()}")
            self._record.sometimes["prefix found under a salt"] += bool(own and answer.shared)
        for handle in handles_array(answer.owned).tolist():
            self._of_handle[worker_id, epoch, Tier.DEVICE, handle] = own

    def moved(self, worker_id: WorkerId, message: CopyOrders) -> None:
        for order in message.orders:
            tiers = _WAYS[order.direction]
            pairs = zip(handles_array(order.src).tolist(), handles_array(order.dst).tolist(), strict=True)
            for source, target in pairs:
                found = self._of_handle[worker_id, message.worker_epoch, tiers[0], source]
                self._of_handle[worker_id, message.worker_epoch, tiers[1], target] = found

    def kept(self, worker_id: WorkerId, before: WorkerEpoch, epoch: WorkerEpoch) -> None:
        """What was on its disk in an epoch that is over is there in this one."""
        for key, salt in list(self._of_handle.items()):
            if key[:3] == (worker_id, before, Tier.DISK):
                self._of_handle[worker_id, epoch, Tier.DISK, key[3]] = salt

    def forked(self, core: WorkerCore, block: int, lease: LeaseId) -> None:
        """This block is about to be copied for this lease."""
        handle = pack_handle(BlockId(block), Generation(int(core.pool.generation[block])))
        key = (core.settings.worker_id, core.worker_epoch, Tier.DEVICE, handle)
        self._read(key, self._of_lease[lease], f"copied by {lease.hex()}")

    def _read(self, key: tuple[WorkerId, WorkerEpoch, Tier, int], own: bytes, how: str) -> None:
        found = self._of_handle[key]
        if found != own:
            self._record.fail("I3", f"a block of salt {found.hex() or 'none'} is {how}, whose salt is {own.hex()}")
