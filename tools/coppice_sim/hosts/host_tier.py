"""The host tier of a simulated worker: copies take a while, beside steps, and what they write is garbage until then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coppice.messages.registration import CopyOrders, Direction
from coppice_sim.base.timeline import MS
from coppice_sim.hosts.kv_honest import KvHonest
from coppice_worker.core.batch.step_batch import PoolSpec
from coppice_worker.core.blocks.copies import CopyWork

if TYPE_CHECKING:
    from coppice_sim.hosts.worker import WorkerHost


class HostTier:
    """Copies what is ordered. All of a copy happens at its end, so what is taken from under it is noticed."""

    def __init__(self, host: WorkerHost, pool: PoolSpec, copy_ms: float) -> None:
        self._host = host
        self._copy_ms = copy_ms
        self.memory = KvHonest(pool)
        self._epoch = 0  # a copy of an earlier one never ends

    def order(self, message: CopyOrders, attachment: int) -> None:
        host = self._host
        ordered = host.core.order_copies(message)
        for work in ordered.works:
            host.env.record.sometimes[f"{work.direction.value}d"] += 1
            self._begin(work)
        if ordered.answer is not None:
            host.env.record.sometimes["copy refused"] += bool(ordered.answer.failed_ids)
            host.env.record.sometimes["copy answered again"] += bool(ordered.answer.order_ids)
            host.answer_cache(ordered.answer, attachment)
        host.env.record.touched.add(host)

    def quiesce(self) -> None:
        """What is under way is over, one way or the other, before the epoch changes."""
        self._epoch += 1

    def _memories(self, work: CopyWork) -> tuple[KvHonest, KvHonest]:
        """Source and target."""
        device = self._host.executor
        return (device, self.memory) if work.direction is Direction.DEMOTE else (self.memory, device)

    def _begin(self, work: CopyWork) -> None:
        _, target = self._memories(work)
        target.zero_blocks(work.dst)
        host, epoch = self._host, self._epoch
        duration_ms = self._copy_ms * (0.2 + host.rng.expovariate(1.0))
        host.after(int(duration_ms * MS) + 1, lambda: self._end(work, epoch))

    def _end(self, work: CopyWork, epoch: int) -> None:
        if epoch != self._epoch:
            return
        host = self._host
        source, target = self._memories(work)
        target.copy_from(source, work.src, work.dst)
        answer, acknowledged = host.core.copied((work.number,))
        host.env.record.sometimes["fence held up by a copy"] += len(acknowledged)
        for message in (answer, *acknowledged):
            if message is not None:
                host.answer_cache(message, host.reported)
        host.env.record.touched.add(host)
