"""The lower tiers of a simulated worker: copies take a while, beside steps, and what they write is garbage until then.

host    as the device: what is copied is there at the end
disk    may take nothing, as it is full, or give nothing, as a file is torn: the copy fails, and its target is garbage;
        what is there outlives the process
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from coppice.messages.registration import NOTHING_LOST, CopyOrders, Direction, Registered
from coppice_sim.base.timeline import MS
from coppice_sim.hosts.disk_files import DiskFiles
from coppice_sim.hosts.kv_honest import KvHonest
from coppice_worker.core.batch.step_batch import PoolSpec
from coppice_worker.core.batch.steps import WorkerCoreSettings
from coppice_worker.core.blocks.copies import CopyWork

if TYPE_CHECKING:
    from coppice_sim.hosts.worker import WorkerHost

_PAST = {
    Direction.DEMOTE: "demoted",
    Direction.PROMOTE: "promoted",
    Direction.STORE: "stored",
    Direction.LOAD: "loaded",
}
_OF_A_DISK = (Direction.STORE, Direction.LOAD)


class LowerTiers:
    """Copies what is ordered. All of a copy happens at its end, so what is taken from under it is noticed."""

    def __init__(
        self, owner: WorkerHost, settings: WorkerCoreSettings, copy_ms: float, disk_faults: float, files: DiskFiles
    ) -> None:
        """`disk_faults` is the share of the copies of a disk that fail."""
        self._owner = owner
        self._copy_ms = copy_ms
        self._disk_faults = disk_faults
        self._disk_rng = Random(f"disk of {settings.worker_id} in {owner.env.seed}")
        self.host = KvHonest(PoolSpec(settings.num_host_blocks, settings.pool.block_size))
        self.files = files
        self.disk = files.memory
        owner.env.record.sometimes["files found"] += files.found_by(owner.core.disk_pool) > 0
        self._epoch = 0  # a copy of an earlier one never ends

    def order(self, message: CopyOrders, attachment: int) -> None:
        owner = self._owner
        ordered = owner.core.order_copies(message)
        for work in ordered.works:
            owner.env.record.sometimes[_PAST[work.direction]] += 1
            self._begin(work)
        if ordered.answer is not None:
            owner.env.record.sometimes["copy refused"] += bool(ordered.answer.failed_ids)
            owner.env.record.sometimes["copy answered again"] += bool(ordered.answer.order_ids)
            owner.answer_cache(ordered.answer, attachment)
        owner.env.record.touched.add(owner)

    def begin(self, message: Registered) -> None:
        """What is under way is over, one way or the other, before the epoch changes."""
        self._epoch += 1
        self.files.begin(message.worker_epoch, keeps=message.keeps_disk)
        self._owner.env.record.sometimes["disk kept"] += message.keeps_disk

    def _memories(self, work: CopyWork) -> tuple[KvHonest, KvHonest]:
        """Source and target."""
        device = self._owner.executor
        return {
            Direction.DEMOTE: (device, self.host),
            Direction.PROMOTE: (self.host, device),
            Direction.STORE: (self.host, self.disk),
            Direction.LOAD: (self.disk, self.host),
        }[work.direction]

    def _begin(self, work: CopyWork) -> None:
        _, target = self._memories(work)
        target.zero_blocks(work.dst)
        if work.direction is Direction.STORE:
            self.files.remove(work.dst)
        owner, epoch = self._owner, self._epoch
        duration_ms = self._copy_ms * (0.2 + owner.rng.expovariate(1.0))
        owner.after(int(duration_ms * MS) + 1, lambda: self._end(work, epoch))

    def _end(self, work: CopyWork, epoch: int) -> None:
        if epoch != self._epoch:
            return
        owner = self._owner
        failed: dict[int, int] = {}
        lost_from = self.files.lost_from(work.order) if work.direction is Direction.LOAD else None
        if lost_from is None and work.direction in _OF_A_DISK and self._disk_rng.random() < self._disk_faults:
            lost_from = NOTHING_LOST
        if lost_from is not None:
            owner.env.record.sometimes[f"not {_PAST[work.direction]}"] += 1
            owner.env.record.sometimes["lost in the middle"] += 0 < lost_from < NOTHING_LOST
            failed = {work.number: lost_from}
        else:
            source, target = self._memories(work)
            target.copy_from(source, work.src, work.dst)
            if work.direction is Direction.STORE:
                self.files.written(work.order)
        answer, acknowledged = owner.core.copied((work.number,), failed)
        owner.env.record.sometimes["fence held up by a copy"] += len(acknowledged)
        for message in (answer, *acknowledged):
            if message is not None:
                owner.answer_cache(message, owner.reported)
        owner.env.record.touched.add(owner)
