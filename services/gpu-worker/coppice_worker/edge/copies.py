"""The thread that copies between the tiers, beside the steps.

    link thread      CopyOrders -> checked, both ends held ----> waiting ----> copier thread -> CopiesDone, FenceAcks
                                  `- refused: answered at once

Promotions go before demotions: somebody waits for them. What waits in one direction is copied, and answered, together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from coppice.messages.registration import CopiesDone, CopyOrders, Direction, FenceAck
from coppice_worker.core.batch.step_batch import Int32
from coppice_worker.core.blocks.copies import CopyWork, Ordered
from coppice_worker.edge.runner import StepObserver, StepRunner

_log = logging.getLogger(__name__)
BATCH_BLOCKS = 256  # copied before the next look at what waits


class TierCopier(Protocol):
    """Moves blocks; each call has moved them when it returns."""

    bytes_per_block: int

    def demote(self, src: Int32, dst: Int32) -> None:
        """Device blocks src [N] to host blocks dst [N]."""

    def promote(self, src: Int32, dst: Int32) -> None:
        """Host blocks src [N] to device blocks dst [N]."""


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
    ) -> None:
        self._runner = runner
        self._tiers = tiers
        self._observer = observer
        self._failed = failed
        self._changed = threading.Condition()
        self._waiting: dict[Direction, deque[CopyWork]] = {Direction.PROMOTE: deque(), Direction.DEMOTE: deque()}
        self._began_ns: int | None = None  # monotonic: when the batch that runs began
        self._is_over = False
        self._answers: Answers | None = None
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)

    def start(self, answers: Answers) -> None:
        self._answers = answers
        self._runner.costs.on_news = self._say_costs
        self._thread.start()

    def stop(self) -> None:
        """Finish the batch that runs, drop what waits."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def order(self, message: CopyOrders, attachment: int) -> None:
        """Start what can be started; answer at once what cannot, or was done before."""
        answer = self._runner.with_core(lambda core: self._submit(core.order_copies(message)))
        if answer is not None:
            assert self._answers is not None
            self._answers.post(answer, attachment)
            self._observer.copies_refused(len(answer.failed_ids))

    def busy_ns(self, now_ns: int) -> int:
        """How long the thread has been at one batch; 0 when it waits. `now_ns` is `time.monotonic_ns`."""
        began_ns = self._began_ns
        return 0 if began_ns is None else now_ns - began_ns

    def quiesce(self) -> None:
        """Drop what waits and wait for what runs. With the core held, so that nothing new is started meanwhile."""
        with self._changed:
            for works in self._waiting.values():
                works.clear()
            self._changed.wait_for(lambda: self._began_ns is None)

    def _say_costs(self) -> None:
        """On the step thread."""
        answers = self._answers
        assert answers is not None
        epoch, attachment = self._runner.with_core(lambda core: (core.worker_epoch, answers.reported))
        answers.post(self._runner.costs.added_to(CopiesDone(epoch)), attachment)

    def _submit(self, ordered: Ordered) -> CopiesDone | None:
        """With the core held: a copy of an epoch that is over must not be handed over late."""
        with self._changed:
            for work in ordered.works:
                self._waiting[work.direction].append(work)
            self._changed.notify_all()
        return ordered.answer

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                self._copy(batch)
        except Exception as error:
            _log.exception("the copier thread failed")
            self._end_batch()
            self._failed(error)

    def _next_batch(self) -> list[CopyWork]:
        """Empty when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or any(self._waiting.values()))
            if self._is_over:
                return []
            waiting = self._waiting[Direction.PROMOTE] or self._waiting[Direction.DEMOTE]
            batch = [waiting.popleft()]
            num_blocks = len(batch[0].src)
            while waiting and num_blocks + len(waiting[0].src) <= BATCH_BLOCKS:
                batch.append(waiting.popleft())
                num_blocks += len(batch[-1].src)
            self._began_ns = time.monotonic_ns()
            return batch

    def _copy(self, batch: list[CopyWork]) -> None:
        src, dst = (np.concatenate(ids) for ids in zip(*((work.src, work.dst) for work in batch), strict=True))
        began_ns = time.perf_counter_ns()
        copy = self._tiers.promote if batch[0].direction is Direction.PROMOTE else self._tiers.demote
        copy(src, dst)
        duration_ns = time.perf_counter_ns() - began_ns
        self._end_batch()
        self._runner.costs.copied(len(src), duration_ns)
        numbers = tuple(work.number for work in batch)
        assert self._answers is not None
        answers = self._answers
        (answer, fences), attachment = self._runner.with_core(lambda core: (core.copied(numbers), answers.reported))
        if answer is not None:
            answers.post(self._runner.costs.added_to(answer), attachment)
        for fence in fences:
            answers.post(fence, attachment)
        self._observer.copied(batch[0].direction, len(src), len(src) * self._tiers.bytes_per_block, duration_ns)

    def _end_batch(self) -> None:
        with self._changed:
            self._began_ns = None
            self._changed.notify_all()
