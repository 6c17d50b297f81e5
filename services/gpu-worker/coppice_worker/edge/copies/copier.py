"""The threads that copy between the tiers, beside the steps.

    link thread     CopyOrders -> checked, both ends held --> waiting --+--> device and host --+-> CopiesDone, FenceAcks
                                 `- refused: answered at once          `--> host and disk ----'

A disk that takes nothing or gives nothing is an answer like others. Of one that was closed as it hung, what was ordered
there has failed, and so has what will be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from coppice.handles import UInt64, handles_array
from coppice.ids import WorkerEpoch
from coppice.messages.registration import NOTHING_LOST, CopiesDone, CopyOrder, CopyOrders, Direction, FenceAck
from coppice_worker.core.batch.step_batch import Bool, Int32
from coppice_worker.core.blocks.copies import CopyWork
from coppice_worker.core.worker import WorkerCore
from coppice_worker.edge.copies.lanes import DiskLane, Failed, Lane, Works
from coppice_worker.edge.runner import StepObserver, StepRunner

BATCH_BLOCKS = 256  # copied before the next look at what waits
DISK_BATCH_BLOCKS = 32


class TierCopier(Protocol):
    """Moves blocks; each call has moved them when it returns."""

    bytes_per_block: int

    def demote(self, src: Int32, dst: Int32) -> None:
        """Device blocks src [N] to host blocks dst [N]."""

    def promote(self, src: Int32, dst: Int32) -> None:
        """Host blocks src [N] to device blocks dst [N]."""


class DiskCopier(Protocol):
    """Copies between blocks of the host and of a disk, by handles [N] and packed seals. It never fails as a whole:
    which blocks were copied is the answer, [N], and of loads which are lost, [N]."""

    num_tried: int  # blocks so far

    def begin(self, epoch: WorkerEpoch, *, keeps: bool) -> None:
        """What is there belongs to this epoch, or nothing is there any more. What is copied under another one touches
        no block of the host from now on."""

    def close(self) -> None:
        """No copy touches a block of the host any more."""

    def store(self, epoch: WorkerEpoch, src: Int32, handles: UInt64, seals: bytes) -> Bool: ...

    def load(self, epoch: WorkerEpoch, handles: UInt64, seals: bytes, dst: Int32) -> tuple[Bool, Bool]: ...


class Answers(Protocol):
    """The session that orders came on, or one that followed it."""

    @property
    def reported(self) -> int:
        """The attachment under which the core was last reported. Asked with the core held: what the core says then
        belongs there, and to no session that begins later."""

    def post(self, message: CopiesDone | FenceAck, attachment: int) -> None: ...


class Copier:
    """Takes orders from any thread. An exception of the device ends the process's usefulness: `failed` is called and
    nothing is copied any more."""

    def __init__(
        self,
        runner: StepRunner,
        tiers: TierCopier,
        observer: StepObserver,
        failed: Callable[[BaseException], None],
        disk: DiskCopier | None = None,
    ) -> None:
        self._runner = runner
        self._tiers = tiers
        self._disk = disk
        self._observer = observer
        self._answers: Answers | None = None
        ways = (Direction.PROMOTE, Direction.DEMOTE)
        self._lanes = [Lane("copies", ways, BATCH_BLOCKS, self._copy, self._copied, failed)]
        if disk is not None:
            ways, name = (Direction.LOAD, Direction.STORE), "copies of the disk"
            rest = name, ways, DISK_BATCH_BLOCKS, self._copy_on_disk, self._copied, failed
            self._lanes.append(DiskLane(lambda: disk.num_tried, self._disk_hangs, *rest))

    def start(self, answers: Answers) -> None:
        self._answers = answers
        self._runner.costs.on_news = self._say_costs
        for lane in self._lanes:
            lane.start()

    def stop(self) -> None:
        """Finish the batches that run, drop what waits."""
        for lane in self._lanes:
            lane.stop()

    def order(self, message: CopyOrders, attachment: int) -> None:
        """Start what can be started; answer at once what cannot, or was done before."""
        said = self._runner.with_core(lambda core: self._submit(core, message))
        assert self._answers is not None
        for answer in said:
            self._answers.post(answer, attachment)
            if isinstance(answer, CopiesDone):
                self._observer.copies_refused(len(answer.failed_ids))

    def busy_ns(self, now_ns: int) -> int:
        """How long the busiest thread has been at one batch, but for that of the disk. `now_ns` is
        `time.monotonic_ns`."""
        return max(lane.busy_ns(now_ns) for lane in self._lanes)

    def begin(self, epoch: WorkerEpoch, *, keeps_disk: bool) -> None:
        """A new worker epoch: drop what waits and wait for what runs, but for the disk, where what runs is nobody's
        from now on. With the core held, so that nothing new is started meanwhile."""
        for lane in self._lanes:
            lane.quiesce()
        if self._disk is not None:
            self._disk.begin(epoch, keeps=keeps_disk)
            self._lanes[-1].add(_nothing(epoch))  # it tells the folder, beside the work

    def hurry(self) -> None:
        """A report waits for the copies that are under way. What only waits for its turn at the disk has failed."""
        if works := [work for lane in self._lanes for work in lane.give_back()]:
            self._end(works, _nothing_lost(works))

    def _say_costs(self) -> None:
        """On the step thread."""
        answers = self._answers
        assert answers is not None
        epoch, attachment = self._runner.with_core(lambda core: (core.worker_epoch, answers.reported))
        answers.post(self._runner.costs.added_to(CopiesDone(epoch)), attachment)

    def _submit(self, core: WorkerCore, message: CopyOrders) -> list[CopiesDone | FenceAck]:
        """With the core held: a copy of an epoch that is over must not be handed over late."""
        ordered = core.order_copies(message)
        lanes = [next(lane for lane in self._lanes if lane.takes(work)) for work in ordered.works]
        refused = _nothing_lost([work for work, lane in zip(ordered.works, lanes, strict=True) if not lane.add(work)])
        answer, fences = core.copied(tuple(refused), refused)
        return [said for said in (ordered.answer, answer, *fences) if said is not None]

    # ---- on the threads of the lanes ----

    def _copy(self, batch: Works) -> Failed:
        src, dst = _together(batch)
        copy = self._tiers.promote if batch[0].direction is Direction.PROMOTE else self._tiers.demote
        copy(src, dst)
        return {}

    def _copy_on_disk(self, batch: Works) -> Failed:
        assert self._disk is not None
        src, dst = _together(batch)
        seals = b"".join(work.order.seals for work in batch)
        if batch[0].direction is Direction.STORE:
            handles = handles_array(b"".join(work.order.dst for work in batch))
            come = self._disk.store(batch[0].worker_epoch, src, handles, seals)
            lost = ~come
        else:
            handles = handles_array(b"".join(work.order.src for work in batch))
            come, lost = self._disk.load(batch[0].worker_epoch, handles, seals, dst)
        return _failed(batch, come, lost)

    def _copied(self, batch: Works, failed: Failed, duration_ns: int) -> None:
        direction = batch[0].direction
        num_blocks = sum(len(work.src) for work in batch if work.number not in failed)
        if num_blocks and not failed:
            self._runner.costs.copied(direction, num_blocks, duration_ns)
        self._end(batch, failed)
        if num_blocks:
            self._observer.copied(direction, num_blocks, num_blocks * self._tiers.bytes_per_block, duration_ns)

    def _end(self, works: Works, failed: Failed) -> None:
        numbers = tuple(work.number for work in works)
        assert self._answers is not None
        answers = self._answers
        (answer, fences), attachment = self._runner.with_core(
            lambda core: (core.copied(numbers, failed), answers.reported)
        )
        if answer is not None:
            answers.post(self._runner.costs.added_to(answer), attachment)
        for fence in fences:
            answers.post(fence, attachment)
        self._observer.copies_refused(len(failed))

    # ---- on the thread that watches the disk ----

    def _disk_hangs(self, ordered: Works) -> None:
        """What was ordered there has failed, once nothing of it can touch a block of the host."""
        assert self._disk is not None
        self._disk.close()
        self._end(ordered, _nothing_lost(ordered))


def _failed(batch: Works, come: Bool, lost: Bool) -> Failed:
    """Those of which not all has come."""
    failed: Failed = {}
    end = 0
    for work in batch:
        start, end = end, end + len(work.src)
        if not come[start:end].all():
            failed[work.number] = int(lost[start:end].argmax()) if lost[start:end].any() else NOTHING_LOST
    return failed


def _nothing_lost(works: Works) -> Failed:
    """None of them was copied, and their sources are as they were."""
    return {work.number: NOTHING_LOST for work in works}


def _nothing(epoch: WorkerEpoch) -> CopyWork:
    """A copy of no block, which nobody has ordered."""
    none = np.zeros(0, np.int32)
    return CopyWork(0, Direction.STORE, none, none, CopyOrder(0, Direction.STORE, b"", b"", b""), epoch)


def _together(batch: Works) -> tuple[Int32, Int32]:
    """Blocks that are read, and those that are written."""
    return np.concatenate([work.src for work in batch]), np.concatenate([work.dst for work in batch])
