"""`coppice.LLM`: a model in this process, for scripts and notebooks. No service, no port, no thread of ours.

    llm = LLM("path/to/checkpoint")
    for generation in llm.generate(["Once upon", "It was"], SamplingOptions(max_tokens=20)):
        print(generation.text)

It is the same cache, scheduler and worker as in the services (`engine.py`), so prompts are batched, and what one call
computed for the beginning of a prompt is found again by the next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coppice.errors import UsageError
from coppice.grammar import Grammars
from coppice.ids import DomainId, WorkerId
from coppice.messages.sampling import COMPLETION_TOKENS
from coppice.namespaces import encode_namespace
from coppice_cache.core.base.settings import CoreSettings, DomainConfig
from coppice_offline.device import DeviceName, DtypeChoice, load_executor
from coppice_offline.engine import EngineSettings, LocalEngine
from coppice_offline.grammars import CompiledGrammars
from coppice_offline.options import Defaults, SamplingOptions, sampling_of, stop_token_ids_of
from coppice_offline.progress import progress_bar
from coppice_offline.prompts import Message, PromptReader, Read
from coppice_offline.results import Generation
from coppice_offline.runner import Runner
from coppice_offline.stream import RequestStream
from coppice_scheduler.core.state.request import Request
from coppice_scheduler.core.state.settings import INSTANCE_BYTES, SchedulerSettings, TenantLimits
from coppice_scheduler.edge.text.checkpoint_text import CheckpointText, load_checkpoint_text
from coppice_scheduler.edge.text.detokenizer import DetokenizerFactory
from coppice_scheduler.edge.text.tokenizer import unpack_tokens
from coppice_up.checkpoint import find_checkpoint
from coppice_worker.core.batch.step_batch import StepLimits
from coppice_worker.core.batch.steps import WorkerCoreSettings

_DOMAIN = DomainId("offline")
_WORKER = WorkerId("offline")
_FOREVER_MS = 1 << 40
_WINDOW_PER_PLACE = 4  # requests in the engine for each that can run, so that it can choose among them
_PROMPT_TAIL_BYTES = 4 * 16


class LLM:
    """One model. Serves one call at a time."""

    def __init__(
        self,
        model: str | Path = "",
        *,
        device: DeviceName = "auto",
        dtype: DtypeChoice = "auto",
        kv_memory_mib: int = 512,
        gpu_memory_utilization: float = 0.9,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_running: int = 256,
        max_step_tokens: int = 2048,
        max_context: int | None = None,
        threads: int | None = None,
    ) -> None:
        """`model`: a checkpoint folder, a name on the Hugging Face hub, or nothing for the demo model.

        The pool has `num_blocks`, or what `kv_memory_mib` holds on a CPU, or on a GPU what is left of
        `gpu_memory_utilization` beside weights and steps. `max_running` and `max_step_tokens` bound a step;
        `max_context` shortens the model's own; `threads` are torch's on a CPU. Raises UsageError, UnavailableError.
        """
        checkpoint = find_checkpoint(str(model))
        text = load_checkpoint_text(checkpoint.folder)
        executor = load_executor(
            checkpoint.folder,
            device=device,
            dtype=dtype,
            num_blocks=num_blocks,
            kv_memory_mib=kv_memory_mib,
            gpu_memory_utilization=gpu_memory_utilization,
            limits=StepLimits(max_running, max_step_tokens),
            block_size=block_size,
            threads=threads,
        )
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
        self._grammars = CompiledGrammars(lambda: Grammars(text.raw.to_str(), vocab_size, text.eos_token_ids))
        settings = _settings(worker, max_running, max_step_tokens)
        engine = LocalEngine(executor, settings, time.monotonic_ns, self._grammars.open)
        self._runner = Runner(engine, _WINDOW_PER_PLACE * max_running)
        self._engine = engine
        self._defaults = _defaults_of(text, vocab_size)
        self._detokenizers = DetokenizerFactory(text.raw)
        self._prompts = PromptReader(text, context, executor.pool, vocab_size)
        self._chat_max_tokens = text.defaults.max_new_tokens or context

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        params: SamplingOptions | Sequence[SamplingOptions] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Generation]:
        """Continue a text, several, or token ids. One Generation for each prompt, in their order.

        `params`: for all prompts, or one for each. `progress`: show a bar; None: on a terminal. Raises UsageError,
        RequestFailed, EngineBroken; KeyboardInterrupt after Ctrl-C, once what was at work has ended.
        """
        return self._serve(self._prompts.read(prompts), params, COMPLETION_TOKENS, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingOptions | Sequence[SamplingOptions] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> list[Generation]:
        """Answer a conversation (mappings with `role` and `content`), or several. As `generate`.

        `chat_template_kwargs`: what the checkpoint's template reads besides the messages, such as `enable_thinking`.
        """
        return self._serve(
            self._prompts.read_chats(messages, chat_template_kwargs or {}), params, self._chat_max_tokens, progress
        )

    def check(self) -> None:
        """Raise if an invariant of the cache, the scheduler or the worker does not hold. For tests."""
        self._engine.check()

    def _serve(
        self,
        prompts: list[Read],
        params: SamplingOptions | Sequence[SamplingOptions] | None,
        max_tokens: int,
        progress: bool | None,
    ) -> list[Generation]:
        options = _one_each(params, len(prompts))
        groups = [
            self._streams_of(tokens, each, each.max_tokens or max_tokens)
            for (_, tokens), each in zip(prompts, options, strict=True)
        ]
        streams = [stream for group in groups for stream in group]
        with progress_bar(streams, progress) as reporter:
            self._runner.run(streams, reporter)
        return [
            Generation(
                prompt=text,
                prompt_token_ids=unpack_tokens(tokens),
                outputs=tuple(stream.completion() for stream in group),
                prompt_logprobs=group[0].prompt_logprobs() if each.prompt_logprobs else None,
            )
            for (text, tokens), each, group in zip(prompts, options, groups, strict=True)
        ]

    def _streams_of(self, tokens: bytes, options: SamplingOptions, max_tokens: int) -> list[RequestStream]:
        """One for each of the n continuations; all after the first share its prefill."""
        if options.grammar:
            self._grammars.check(options.grammar)
        ends = stop_token_ids_of(options, self._defaults)
        streams: list[RequestStream] = []
        for index, sampling in enumerate(sampling_of(options, self._defaults)):
            number = self._runner.new_number()
            request = Request(
                request_id=str(number),
                tenant=_DOMAIN,
                domain=_DOMAIN,
                tokens=tokens,
                sampling=sampling,
                max_new_tokens=max_tokens,
                stop_token_ids=ends,
                number=number,
                streams=bool(options.stops),
                retries_late=True,
                fork_of=streams[0].request.request_id if streams else None,
            )
            tail = unpack_tokens(tokens[-_PROMPT_TAIL_BYTES:])
            streams.append(RequestStream(index, request, self._detokenizers.start(tail), options.stops))
        return streams


def _one_each(params: SamplingOptions | Sequence[SamplingOptions] | None, count: int) -> Sequence[SamplingOptions]:
    if params is None or isinstance(params, SamplingOptions):
        return [params or SamplingOptions()] * count
    if len(params) != count:
        raise UsageError(f"params has {len(params)} entries for {count} prompts", hint="give one, or one for each")
    return params


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
    index = CoreSettings(seal_key=os.urandom(32), default_domain=DomainConfig(_DOMAIN))
    return EngineSettings(index, scheduler, worker)


def _defaults_of(text: CheckpointText, vocab_size: int) -> Defaults:
    said = text.defaults
    return Defaults(said.temperature, said.top_p, said.top_k, text.eos_token_ids, vocab_size)
