"""One cache, one scheduler, one worker in one process: the cores of the services, called directly.

    submit, cancel ---> scheduler core --ops--> index core --answers--> scheduler core
                              |  ^
                       plan   v  |  result
                           worker core --batch--> executor --tokens--> worker core

`step` and `advance` take turns. What is submitted after a step, before the `advance` that takes its result, asks for
its blocks before the next step is planned, as it would if a planner ran beside the worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from coppice.ids import CacheEpoch, SchedulerEpoch
from coppice.messages.registration import Fence, Owner, Registered
from coppice.messages.step import StepPlan, StepResult
from coppice_cache.core.base.results import ToClientEffect, ToWorkerEffect
from coppice_cache.core.base.settings import CoreSettings
from coppice_cache.core.index import IndexCore
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Finish, Output, Refused, Request, SchedulerStats, TokenBatch
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_worker.core.batch.guides import OpenGuide
from coppice_worker.core.batch.run import run
from coppice_worker.core.batch.step_batch import Executor
from coppice_worker.core.batch.steps import Applied, SchedulerAccepted, WorkerCoreSettings
from coppice_worker.core.worker import WorkerCore

_CACHE_EPOCH = CacheEpoch(1)
_TICK_NS = 100_000_000
NS_PER_US = 1_000


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the three cores are told."""

    index: CoreSettings
    scheduler: SchedulerSettings
    worker: WorkerCoreSettings


@dataclass(frozen=True, slots=True)
class Told:
    """What an `advance` brought: tokens of requests that stream, in order, then outputs."""

    tokens: tuple[TokenBatch, ...]
    outputs: tuple[Output, ...]


class LocalEngine:
    """Serves requests on one executor. To be used from one thread; `now_ns` is a monotonic clock."""

    def __init__(
        self,
        executor: Executor,
        settings: EngineSettings,
        now_ns: Callable[[], int],
        open_guide: OpenGuide | None = None,
    ) -> None:
        """`open_guide`: see `WorkerCore`."""
        self._executor: Executor | None = executor  # None: closed
        self._now_ns = now_ns
        self._scheduler = SchedulerCore(settings.scheduler)
        self._worker = WorkerCore(settings.worker, open_guide)
        self._worker_id = settings.worker.worker_id
        self._plans: deque[StepPlan] = deque()
        self._result: StepResult | None = None  # of the last step; `advance` takes it
        self._submitted = False
        self._heard = False  # the index said something since the scheduler last decided
        now = now_ns()
        self._ticked_ns = now
        self._index = IndexCore(settings.index, _CACHE_EPOCH, now)
        self._epoch = self._attach(now)

    def _attach(self, now: int) -> SchedulerEpoch:
        epoch = self._index.attach_client(SchedulerEpoch(0), now)
        self._scheduler.index_attached(epoch, _CACHE_EPOCH, True, now)
        self._index.receive_worker(self._worker_id, self._worker.registration(), now)
        self._carry_out(now)
        accepted = self._worker.attach_scheduler(epoch)
        assert isinstance(accepted, SchedulerAccepted)
        self._scheduler.worker_attached(self._worker_id, accepted.worker_epoch, True, now)
        return epoch

    # ---- requests

    def submit(self, request: Request) -> Refused | None:
        """None: taken, and exactly one Output with `finish` will come."""
        self._submitted = True
        return self._scheduler.submit(request, self._now_ns())

    def cancel(self, request_id: str, finish: Finish = Finish.CANCELLED) -> None:
        """End a request; unknown and finished ones are left alone."""
        self._scheduler.cancel(request_id, self._now_ns(), finish)

    def close(self) -> None:
        """Lets the executor go, whoever still knows this engine. Nothing is computed any more."""
        self._executor = None

    @property
    def is_idle(self) -> bool:
        """Nothing is at work, and everything that was used is given back."""
        return self._result is None and not self._plans and self._scheduler.is_idle()

    def wait_ns(self) -> int:
        """How long there is nothing to do for, unless something is submitted; 0: not at all."""
        if self._result is not None or self._plans or self._submitted or self._heard:
            return 0
        wakeup_ns = self._scheduler.next_wakeup_ns()
        return _TICK_NS if wakeup_ns is None else min(max(wakeup_ns - self._now_ns(), 0), _TICK_NS)

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def check(self) -> None:
        """Every invariant of the three cores. Cost: all blocks, nodes and leases."""
        self._index.check()
        self._scheduler.check()
        self._worker.check()

    # ---- work

    def advance(self) -> Told:
        """Take the last step's result, ask the index for what is needed, plan."""
        tokens: list[TokenBatch] = []
        outputs: list[Output] = []
        if self._result is not None:
            if self._submitted:  # they get their blocks before the next step is planned
                self._decide(tokens, outputs)
            result, self._result = self._result, None
            self._scheduler.worker_result(self._worker_id, result, self._now_ns())
        self._submitted = False
        self._decide(tokens, outputs)
        return Told(tuple(tokens), tuple(outputs))

    def step(self) -> bool:
        """Compute the next planned step. False: nothing is planned."""
        if not self._plans:
            return False
        assert self._result is None, "advance takes the result of a step before the next one"
        self._result = self._compute(self._plans.popleft())
        return True

    def _decide(self, tokens: list[TokenBatch], outputs: list[Output]) -> None:
        now = self._now_ns()
        if now - self._ticked_ns >= _TICK_NS:
            self._tick(now)
        self._heard = False
        effects = self._scheduler.advance(now)
        self._plans.extend(plan for _, plan in effects.plans)
        tokens += effects.tokens
        outputs += effects.outputs
        for message in effects.to_index:
            self._index.receive_client(self._epoch, message, now)
        self._carry_out(now)

    def _tick(self, now: int) -> None:
        """Both sessions live as long as this process does, however long a step or a pause between calls took."""
        self._ticked_ns = now
        self._index.heard_client(self._epoch, now)
        self._index.heard_worker(self._worker_id, now)
        self._index.tick(now)

    def _carry_out(self, now: int) -> None:
        while effects := self._index.take_effects():
            for effect in effects:
                match effect:
                    case ToClientEffect(_, message):
                        self._heard = True
                        self._scheduler.index_message(message, now)
                    case ToWorkerEffect(_, Registered() as registered):
                        self._worker.registered(registered)
                    case ToWorkerEffect(_, Owner() as owner):
                        self._worker.owned(owner)
                    case ToWorkerEffect(_, Fence() as fence):
                        acknowledgement = self._worker.fence(fence)
                        assert acknowledgement is not None, "there is no host tier here, so no copy holds it up"
                        self._index.receive_worker(self._worker_id, acknowledgement, now)
                    case _:
                        raise AssertionError(f"nothing here can bring the index to {effect!r}")

    def _compute(self, plan: StepPlan) -> StepResult:
        assert self._executor is not None, "a closed engine computes nothing"
        applied = self._worker.apply(self._epoch, plan)
        assert isinstance(applied, Applied), "plans come in order, each once"
        began_ns = self._now_ns()
        applied, output = run(self._worker, self._executor, applied)
        return self._worker.complete(applied, output, (self._now_ns() - began_ns) // NS_PER_US)
