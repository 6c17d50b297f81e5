"""The three real cores joined by direct calls, one request at a time: for tests that look at the path itself."""

from __future__ import annotations

import numpy as np

from coppice.ids import CacheEpoch, DomainId, Namespace, SchedulerEpoch, WorkerId
from coppice.messages.registration import Registered
from coppice.messages.step import SamplingParams
from coppice_cache.core.base.results import ToClientEffect, ToWorkerEffect
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_cache.core.index import IndexCore
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Output, Request
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_worker.core.batch.step_batch import PoolSpec, StepOutput
from coppice_worker.core.batch.steps import Applied, WorkerCoreSettings
from coppice_worker.core.worker import WorkerCore

WORKER = WorkerId("w0")


class Trio:
    """`serve` runs a request to its end; every sampled token is 7."""

    def __init__(self, *, num_blocks: int, block_size: int, max_context: int) -> None:
        self.now_ns = 1
        self.index = IndexCore(
            CoreSettings(seal_key=b"k" * 16, default_domain=DomainConfig(domain=DomainId("default"))),
            CacheEpoch(1),
            self.now_ns,
        )
        pool = PoolSpec(num_blocks, block_size)
        self.worker = WorkerCore(
            WorkerCoreSettings(
                WORKER, "nowhere:1", pool, Namespace(b"n"), "m", max_context=max_context, max_step_tokens=max_context
            )
        )
        self.scheduler = SchedulerCore(
            SchedulerSettings(
                instance=b"instance",
                max_context=max_context,
                max_step_tokens=max_context,
                max_chunk_tokens=max_context,
            )
        )
        self._epoch = self.index.attach_client(SchedulerEpoch(0), self.now_ns)
        self.scheduler.index_attached(self._epoch, CacheEpoch(1), True, self.now_ns)
        self.index.receive_worker(WORKER, self.worker.registration(), self.now_ns)
        self._deliver()
        self.worker.attach_scheduler(self._epoch)
        self.scheduler.worker_attached(WORKER, self.worker.worker_epoch, True, self.now_ns)

    def _deliver(self) -> None:
        for effect in self.index.take_effects():
            if isinstance(effect, ToClientEffect):
                self.scheduler.index_message(effect.message, self.now_ns)
            elif isinstance(effect, ToWorkerEffect) and isinstance(effect.message, Registered):
                self.worker.registered(effect.message)

    def serve(self, tokens: bytes, max_new_tokens: int) -> Output:
        self.submit("r", tokens, max_new_tokens)
        outcome: Output | None = None
        while outcome is None or not self.scheduler.is_idle():
            outcome = next((output for output in self.turn() if output.finish), outcome)
        return outcome

    def submit(self, request_id: str, tokens: bytes, max_new_tokens: int) -> None:
        request = Request(request_id, "t", DomainId("default"), tokens, SamplingParams(temperature=0.0), max_new_tokens)
        assert self.scheduler.submit(request, self.now_ns) is None

    def turn(self) -> tuple[Output, ...]:
        """One turn of the scheduler, and all that follows from it."""
        self.now_ns += 1_000_000
        effects = self.scheduler.advance(self.now_ns)
        for message in effects.to_index:
            self.index.receive_client(self._epoch, message, self.now_ns)
        self._deliver()
        for _, plan in effects.plans:
            applied = self.worker.apply(self._epoch, plan)
            assert isinstance(applied, Applied)
            count = 0 if applied.batch is None else len(applied.batch.sample.rows)
            result = self.worker.complete(applied, StepOutput(np.full(count, 7, np.int32)))
            self.scheduler.worker_result(WORKER, result, self.now_ns)
        return effects.outputs
