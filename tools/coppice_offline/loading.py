"""A checkpoint and its executor to what serves them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from coppice.errors import UsageError
from coppice.grammar import Grammars
from coppice.ids import WorkerId
from coppice.namespaces import encode_namespace
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_offline.engine import EngineSettings, LocalEngine
from coppice_offline.grammars import CompiledGrammars
from coppice_offline.interface.options import Defaults
from coppice_offline.prompts import PromptReader
from coppice_offline.requests import DOMAIN, RequestMaker
from coppice_offline.runner import Runner
from coppice_scheduler.core.state.settings import INSTANCE_BYTES, SchedulerSettings, TenantLimits
from coppice_scheduler.edge.text.answer_syntax import AnswerSyntax
from coppice_scheduler.edge.text.chat import ChatTemplate
from coppice_scheduler.edge.text.checkpoint_text import CheckpointText, load_checkpoint_text
from coppice_scheduler.edge.text.detokenizer import DetokenizerFactory
from coppice_up.checkpoint import Checkpoint
from coppice_worker.core.batch.steps import WorkerCoreSettings
from coppice_worker.model.executor import TorchExecutor

_WORKER = WorkerId("offline")
_FOREVER_MS = 1 << 40
_WINDOW_PER_PLACE = 4  # requests in the engine for each that can run, so that it can choose among them


@dataclass(frozen=True, slots=True)
class Loaded:
    engine: LocalEngine
    runner: Runner
    prompts: PromptReader
    requests: RequestMaker
    chat_max_tokens: int
    max_running: int


def load(
    checkpoint: Checkpoint,
    executor: TorchExecutor,
    *,
    max_running: int,
    max_step_tokens: int,
    max_context: int | None,
) -> Loaded:
    """Raises UsageError."""
    text = load_checkpoint_text(checkpoint.folder)
    context = min(max_context or executor.info.max_context, executor.info.max_context)
    worker = WorkerCoreSettings(
        worker_id=_WORKER,
        address="here",
        pool=executor.pool,
        namespace=encode_namespace(executor.namespace),
        model=checkpoint.name,
        max_sequences=max_running,
        max_context=context,
        max_step_tokens=max_step_tokens,
    )
    vocab_size = executor.info.vocab_size
    grammars = CompiledGrammars(lambda: Grammars(text.raw.to_str(), vocab_size, text.eos_token_ids))
    settings = _settings(worker, max_running, max_step_tokens)
    engine = LocalEngine(executor, settings, time.monotonic_ns, grammars.open)
    runner = Runner(engine, _WINDOW_PER_PLACE * max_running)
    template = ChatTemplate(text)
    syntax = AnswerSyntax(text, template)
    defaults = _defaults_of(text, vocab_size)
    detokenizers = DetokenizerFactory(text.raw)
    return Loaded(
        engine=engine,
        runner=runner,
        prompts=PromptReader(text, template, syntax.reasoning, context, executor.pool, vocab_size),
        requests=RequestMaker(
            syntax,
            grammars,
            detokenizers,
            defaults,
            context,
            executor.pool.num_blocks * executor.pool.block_size,
            runner.new_number,
        ),
        chat_max_tokens=text.defaults.max_new_tokens or context,
        max_running=max_running,
    )


def _settings(worker: WorkerCoreSettings, max_running: int, max_step_tokens: int) -> EngineSettings:
    """Nobody else uses this engine: there is one tenant without limits, and nobody waits in vain."""
    queued = _WINDOW_PER_PLACE * max_running
    try:
        scheduler = SchedulerSettings(
            instance=os.urandom(INSTANCE_BYTES),
            max_step_tokens=max_step_tokens,
            max_chunk_tokens=max_step_tokens,
            max_running=max_running,
            max_queued=queued,
            max_queued_tokens=queued * worker.max_context,
            queue_timeout_ms=_FOREVER_MS,
            max_steps_in_flight=1,  # a step is planned when the one before is done: nothing computes meanwhile
            max_context=worker.max_context,
            default_limits=TenantLimits(max_concurrency=queued, max_queued=queued),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    index = CoreSettings(seal_key=os.urandom(32), default_domain=DomainConfig(DOMAIN))
    return EngineSettings(index, scheduler, worker)


def _defaults_of(text: CheckpointText, vocab_size: int) -> Defaults:
    said = text.defaults
    return Defaults(said.temperature, said.top_p, said.top_k, text.eos_token_ids, vocab_size)
