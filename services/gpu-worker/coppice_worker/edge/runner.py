"""The step thread: the only one that touches the core and the device, strictly in order of arrival.

    session threads - plans, fences, handshakes ----> queue ----> step thread ----> results, acknowledgements
    (heartbeats and acknowledgements of the links never wait for a step)

The core is used under a lock all the same: copies between the tiers are ordered and end beside a step (`edge/copies`).
It is not held while the device computes.

Everything that must happen "after all earlier steps have completed" (fences, a new epoch, the end of a scheduler's
session) is an item of the same queue, so it does.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from coppice.ids import SchedulerEpoch
from coppice.messages.registration import Direction
from coppice.messages.step import StepPlan, StepResult
from coppice_worker.core.batch.run import run
from coppice_worker.core.batch.step_batch import Executor, StepBatch, StepOutput
from coppice_worker.core.batch.steps import Applied, MalformedPlanError, Replayed, StepGap
from coppice_worker.core.worker import WorkerCore
from coppice_worker.edge.copies.costs import MeasuredCosts

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class StepObserver:
    """Hears of every computed step, on the step thread, and of copies. The default ignores it."""

    def planned(self, plan: StepPlan) -> None:
        """A plan was taken."""

    def cleared(self) -> None:
        """Every sequence is gone without having been detached."""

    def computed(self, plan: StepPlan, result: StepResult, started_ns: int, ended_ns: int) -> None:
        """Its result is ready; times are `time.time_ns`."""

    def copied(self, direction: Direction, num_blocks: int, num_bytes: int, duration_ns: int) -> None:
        """Blocks were copied between the tiers; on the copier's thread."""

    def copies_refused(self, count: int) -> None:
        """So many orders to copy failed; on the thread of the session."""


class StepRunner:
    """Runs the core and the executor on one thread. An exception of the device ends the process's usefulness: `failed`
    is called once and nothing is computed any more."""

    def __init__(
        self, core: WorkerCore, executor: Executor, observer: StepObserver, failed: Callable[[BaseException], None]
    ) -> None:
        self.costs = MeasuredCosts()
        self._core = core
        self._executor = executor
        self._observer = observer
        self._failed = failed
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the core
        self._attachment = core.attachment
        self._began_ns: int | None = None  # monotonic: when the item that runs began
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the step that runs, drop what waits."""
        self._items.put(None)
        self._thread.join(timeout=30)

    def later(self, work: Callable[[], None]) -> None:
        """Run `work` on the step thread, after everything that was handed over before."""
        self._items.put(work)

    def with_core(self, use: Callable[[WorkerCore], ResultT]) -> ResultT:
        """On any thread, maybe beside a step that the device computes: only for what a step does not rely on."""
        with self._lock:
            return use(self._core)

    def ask(self, question: Callable[[WorkerCore], ResultT], timeout_s: float) -> ResultT:
        """Answer a question about the core from another thread. Raises TimeoutError, and then it is never asked:
        what it would change is not wanted any more.
        """
        answer: Future[ResultT] = Future()

        def work() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(self.with_core(question))
            except Exception as error:
                answer.set_exception(error)

        self._items.put(work)
        try:
            return answer.result(timeout=timeout_s)
        except TimeoutError:
            if answer.cancel():
                raise
            return answer.result(timeout=timeout_s)  # it has begun: what it changes must be known

    def step(
        self,
        epoch: SchedulerEpoch,
        plan: StepPlan,
        wanted: Callable[[], bool],
        answer: Callable[[StepResult], Any],
        broken: Callable[[str], Any],
    ) -> None:
        """Apply, compute and answer `plan` if it is still `wanted` when its turn comes; `broken` hears of a plan that
        breaks the protocol."""
        self._items.put(lambda: self._step(epoch, plan, answer, broken) if wanted() else None)

    def busy_ns(self, now_ns: int) -> int:
        """How long the step thread has been at one step; 0 when it waits. `now_ns` is `time.monotonic_ns`."""
        began_ns = self._began_ns
        return 0 if began_ns is None else now_ns - began_ns

    # ---- the thread ----

    def _run(self) -> None:
        while (work := self._items.get()) is not None:
            self._began_ns = time.monotonic_ns()
            try:
                work()
                if self._attachment != self._core.attachment:
                    self._attachment = self._core.attachment
                    self._observer.cleared()
            except Exception as error:
                _log.exception("the step thread failed")
                self._failed(error)
                return
            finally:
                self._began_ns = None

    def _step(
        self,
        epoch: SchedulerEpoch,
        plan: StepPlan,
        answer: Callable[[StepResult], Any],
        broken: Callable[[str], Any],
    ) -> None:
        try:
            applied = self.with_core(lambda core: core.apply(epoch, plan))
        except MalformedPlanError as error:
            broken(str(error))
            return
        match applied:
            case Replayed(result):
                answer(result)
            case StepGap(expected):
                broken(f"step {plan.step} came where {expected} was due")
            case Applied():
                self._observer.planned(plan)
                self._compute(plan, applied, answer)

    def _compute(self, plan: StepPlan, applied: Applied, answer: Callable[[StepResult], Any]) -> None:
        started_ns, began = time.time_ns(), time.perf_counter_ns()
        applied, output = run(self, self._executor, applied)
        duration_us = (time.perf_counter_ns() - began) // 1000
        with self._lock:
            result = self._core.complete(applied, output, duration_us)
        ended_ns = time.time_ns()
        answer(result)  # first of all: somebody waits for these tokens
        self.costs.computed(result)
        self._observer.computed(plan, result, started_ns, ended_ns)

    # ---- `Passes` ----

    def advance(self, applied: Applied, output: StepOutput) -> Applied | None:
        with self._lock:
            return self._core.advance(applied, output)

    def ahead(self, applied: Applied) -> StepBatch | None:
        with self._lock:
            return self._core.ahead(applied)
