"""A `LocalEngine` over the KV-honest model: what comes out tells whether every read was right."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

from tokenizers import Tokenizer, models

from coppice.ids import DomainId, Namespace, WorkerId
from coppice.messages.step import SamplingParams
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_offline.answers.request_stream import RequestStream
from coppice_offline.engine import EngineSettings, LocalEngine
from coppice_offline.runner import Runner
from coppice_scheduler.core.state.request import Request
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_scheduler.edge.text.detokenizer import DetokenizerFactory
from coppice_sim.hosts.kv_honest import KvHonest
from coppice_worker.core.batch.step_batch import Executor, PoolSpec
from coppice_worker.core.batch.steps import WorkerCoreSettings

DOMAIN = DomainId("offline")
MAX_CONTEXT = 96
BLOCK_SIZE = 4


class Silent:
    def report(self) -> None: ...


class HonestEngine:
    """`generate` serves prompts (packed u32) together."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_running: int = 8,
        max_step_tokens: int = 32,
        max_steps_in_flight: int = 1,
        executor: Executor | None = None,
        window: int = 32,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        pool = PoolSpec(num_blocks, BLOCK_SIZE)
        worker = WorkerCoreSettings(
            WorkerId("w"), "here", pool, Namespace(b"n"), "m", max_sequences=2 * max_running, max_context=MAX_CONTEXT
        )
        scheduler = SchedulerSettings(
            instance=b"instance",
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_steps_in_flight=max_steps_in_flight,
            max_context=MAX_CONTEXT,
        )
        index = CoreSettings(seal_key=b"k" * 16, default_domain=DomainConfig(DOMAIN))
        self.engine = LocalEngine(executor or KvHonest(pool), EngineSettings(index, scheduler, worker), now_ns)
        self.runner = Runner(self.engine, window)
        self._detokenizers = DetokenizerFactory(Tokenizer(models.BPE()))

    def stream(self, prompt: bytes, seed: int, max_tokens: int) -> RequestStream:
        number = self.runner.new_number()
        request = Request(
            str(number), DOMAIN, DOMAIN, prompt, SamplingParams(seed=seed), max_tokens, number=number, streams=False
        )
        return RequestStream(0, request, self._detokenizers.start([]), ())

    def generate(self, asked: list[tuple[bytes, int, int]]) -> list[list[int]]:
        """Output tokens for each (prompt, seed, max tokens)."""
        streams = [self.stream(*each) for each in asked]
        self.runner.run(streams, Silent())
        return [stream.completion().token_ids for stream in streams]
