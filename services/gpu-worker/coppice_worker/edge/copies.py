"""The threads that copy between the tiers, beside the steps.

    link thread     CopyOrders -> checked, both ends held --> waiting --+--> device and host --+-> CopiesDone, FenceAcks
                                 `- refused: answered at once          `--> host and disk ----'

There is a thread for each of the two. On each what comes up goes before what goes down: somebody waits for it. What
waits in one direction is copied, and answered, together.

A disk that takes nothing or gives nothing is an answer like others. One that is silent for long is closed for the life
of the process: what was ordered there has failed, and so has what will be. Nobody else waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from coppice.handles import UInt64, handles_array
from coppice.ids import WorkerEpoch
from coppice.messages.registration import NOTHING_LOST, CopiesDone, CopyOrder, CopyOrders, Direction, FenceAck
from coppice_worker.core.batch.step_batch import Bool, Int32
from coppice_worker.core.blocks.copies import CopyWork
from coppice_worker.core.worker import WorkerCore
from coppice_worker.edge.runner import StepObserver, StepRunner

_log = logging.getLogger(__name__)
BATCH_BLOCKS = 256  # copied before the next look at what waits
DISK_BATCH_BLOCKS = 32
DISK_PATIENCE_S = 30.0  # with one block; what hangs in the kernel may go on for ever
_DISK_LOOKS = 6  # in that time: to a process that was paused all of it is over at once, but for the looks
STOP_S = 30.0  # with the batch that runs when the process ends
DISK_STOP_S = 5.0  # with the batch that runs when the process ends
Works = list[CopyWork]
Failed = dict[int, int]  # by number: from which of its blocks on the source has lost them


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


class _Lane:
    """One thread, and what waits for it: `up` goes before `down`. `copy` gives what failed, and `done` is called with
    that and the time that it took, once the thread counts as idle again."""

    def __init__(
        self,
        name: str,
        ways: tuple[Direction, Direction],
        batch_blocks: int,
        copy: Callable[[Works], Failed],
        done: Callable[[Works, Failed, int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._batch_blocks = batch_blocks
        self._copy, self._done, self._failed = copy, done, failed
        self._changed = threading.Condition()
        self._up: deque[CopyWork] = deque()
        self._down: deque[CopyWork] = deque()
        self._waiting = dict(zip(ways, (self._up, self._down), strict=True))
        self._batch: Works = []  # that runs
        self._began_ns: int | None = None  # monotonic: when it began
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the batch that runs, drop what waits."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=STOP_S)

    def add(self, work: CopyWork) -> bool:
        """False: nothing is copied here any more."""
        with self._changed:
            self._waiting[work.direction].append(work)
            self._changed.notify_all()
            return True

    def takes(self, work: CopyWork) -> bool:
        return work.direction in self._waiting

    def busy_ns(self, now_ns: int) -> int:
        """How long the thread has been at one batch; 0 when it waits."""
        began_ns = self._began_ns
        return 0 if began_ns is None else now_ns - began_ns

    def quiesce(self) -> None:
        """Drop what waits and wait for what runs."""
        with self._changed:
            self._drop()
            self._changed.wait_for(lambda: self._began_ns is None)

    def give_back(self) -> Works:
        """Drop and return what waits, if it may be long until its turn."""
        return []

    def _drop(self) -> Works:
        waiting = [*self._up, *self._down]
        self._up.clear()
        self._down.clear()
        return waiting

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                began_ns = time.perf_counter_ns()
                failed = self._copy(batch)
                duration_ns = time.perf_counter_ns() - began_ns
                if self._end_batch():
                    self._done(batch, failed, duration_ns)
        except Exception as error:
            _log.exception("the thread of the %s failed", self._thread.name)
            self._break(error)

    def _break(self, error: Exception) -> None:
        self._end_batch()
        self._failed(error)

    def _next_batch(self) -> Works:
        """Empty when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._up or self._down)
            if self._is_over:
                return []
            waiting = self._up or self._down
            batch = [waiting.popleft()]
            num_blocks = len(batch[0].src)
            while waiting and num_blocks + len(waiting[0].src) <= self._batch_blocks:
                batch.append(waiting.popleft())
                num_blocks += len(batch[-1].src)
            self._batch, self._began_ns = batch, time.monotonic_ns()
            self._changed.notify_all()
            return batch

    def _end_batch(self) -> bool:
        """False: nobody waits for it any more."""
        with self._changed:
            is_awaited = self._began_ns is not None
            self._batch, self._began_ns = [], None
            self._changed.notify_all()
            return is_awaited


class _DiskLane(_Lane):
    """Its thread may be held in the kernel for ever. Nobody waits for that: a second thread, which watches it, calls
    `hung` once with what was ordered, and from then on nothing is copied here."""

    def __init__(self, disk: DiskCopier, hung: Callable[[Works], None], *rest: Any) -> None:
        super().__init__(*rest)
        self._disk = disk
        self._hung = hung
        self._watcher = threading.Thread(target=self._watch, name=f"watch of {self._thread.name}", daemon=True)

    def start(self) -> None:
        super().start()
        self._watcher.start()

    def stop(self) -> None:
        """Finish the batch that runs, if that is soon."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._began_ns is None, timeout=DISK_STOP_S)
            self._is_over = True
            self._drop()
            self._changed.notify_all()

    def add(self, work: CopyWork) -> bool:
        with self._changed:
            return not self._is_over and super().add(work)

    def busy_ns(self, now_ns: int) -> int:
        return 0

    def give_back(self) -> Works:
        with self._changed:
            return self._drop()

    def quiesce(self) -> None:
        """Drop what waits. What runs is of an epoch that is over, which the disk is told."""
        with self._changed:
            self._drop()

    def _break(self, error: Exception) -> None:
        """Nobody else is the worse for it."""
        self._close()

    def _watch(self) -> None:
        while (began_ns := self._next_began_ns()) is not None:
            if self._hangs(began_ns):
                self._close()

    def _close(self) -> None:
        with self._changed:
            if self._is_over:
                return
            ordered = [*self._batch, *self._drop()]
            self._is_over, self._began_ns = True, None
            self._changed.notify_all()
        self._hung(ordered)

    def _hangs(self, began_ns: int) -> bool:
        """Waits for the batch to end, or for too long without another block."""
        num_tried, num_looks = self._disk.num_tried, 0
        with self._changed:
            while num_looks < _DISK_LOOKS:
                if self._changed.wait_for(partial(self._has_ended, began_ns), timeout=DISK_PATIENCE_S / _DISK_LOOKS):
                    return False
                is_alive = num_tried != (num_tried := self._disk.num_tried)
                num_looks = 0 if is_alive else num_looks + 1
            return True

    def _has_ended(self, began_ns: int) -> bool:
        return self._began_ns != began_ns

    def _next_began_ns(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._began_ns is not None)
            return None if self._is_over else self._began_ns


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
        self._lanes = [_Lane("copies", ways, BATCH_BLOCKS, self._copy, self._copied, failed)]
        if disk is not None:
            ways, name = (Direction.LOAD, Direction.STORE), "copies of the disk"
            rest = name, ways, DISK_BATCH_BLOCKS, self._copy_on_disk, self._copied, failed
            self._lanes.append(_DiskLane(disk, self._disk_hangs, *rest))

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
            come = self._disk.store(batch[0].worker_epoch, src, handles, seals, self._disk_lane.let_up)
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
        _log.error(
            "the disk tier has not answered for %.0f s: it is closed for as long as this process lives", DISK_PATIENCE_S
        )
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
