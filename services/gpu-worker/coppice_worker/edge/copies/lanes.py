"""Lanes: a thread each, and the copies that wait for it.

What comes up goes before what goes down: somebody waits for it. What waits in one direction is copied, and answered,
together. A disk that is silent for long is closed for the life of the process; nobody else waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from coppice.messages.registration import Direction
from coppice_worker.core.blocks.copies import CopyWork

DISK_PATIENCE_S = 30.0  # with one block; what hangs in the kernel may go on for ever
_DISK_LOOKS = 6  # in that time: to a process that was paused all of it is over at once, but for the looks
STOP_S = 30.0  # with the batch that runs when the process ends
DISK_STOP_S = 5.0  # the same, with that of a disk
Works = list[CopyWork]
Failed = dict[int, int]  # by number: from which of its blocks on the source has lost them

_HUNG = "the disk tier has not answered for %.0f s: it is closed for as long as this process lives"
_log = logging.getLogger(__name__)


class Lane:
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
        self._batch: Works = []  # that runs, or is not answered yet
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
                self._batch = []
        except Exception as error:
            _log.exception("the thread of the %s failed", self._thread.name)
            self._break(error)

    def _break(self, error: Exception) -> None:
        self._end_batch()
        self._batch = []
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
            self._began_ns = None
            self._changed.notify_all()
            return is_awaited


class DiskLane(Lane):
    """Its thread may be held in the kernel for ever. Nobody waits for that: a second thread, which watches it, calls
    `hung` once with what was ordered, and from then on nothing is copied here. `num_tried`: blocks so far."""

    def __init__(self, num_tried: Callable[[], int], hung: Callable[[Works], None], *rest: Any) -> None:
        super().__init__(*rest)
        self._num_tried = num_tried
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
                _log.error(_HUNG, DISK_PATIENCE_S)
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
        num_tried, num_looks = self._num_tried(), 0
        with self._changed:
            while num_looks < _DISK_LOOKS:
                if self._changed.wait_for(partial(self._has_ended, began_ns), timeout=DISK_PATIENCE_S / _DISK_LOOKS):
                    return False
                is_alive = num_tried != (num_tried := self._num_tried())
                num_looks = 0 if is_alive else num_looks + 1
            return True

    def _has_ended(self, began_ns: int) -> bool:
        return self._began_ns != began_ns

    def _next_began_ns(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._began_ns is not None)
            return None if self._is_over else self._began_ns
