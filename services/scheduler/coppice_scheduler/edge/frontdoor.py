"""The front door without a framework: REST and gRPC both go through here, so they cannot differ.

    1 tenant_of(bearer)                        who calls
    2 open(tenant, spec) -> Call               everything that can be refused without the engine
    3 Call.deltas() -> Delta, Delta, ...       engine -> tokens -> text -> stop strings -> usage

All prompts of a call run at once. A refusal or failure of one ends the call; closing `deltas()` cancels what runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from uuid import uuid4

from opentelemetry import trace
from opentelemetry.context import Context

from coppice.messages.step import SamplingParams
from coppice.tenants import Tenant, TenantDirectory
from coppice_scheduler.core.request import Output, Request
from coppice_scheduler.edge.admission import Admitted, PromptReader, check_stops, sampling_of
from coppice_scheduler.edge.chat import ChatTemplate
from coppice_scheduler.edge.checkpoint_text import CheckpointText
from coppice_scheduler.edge.detokenizer import DetokenizerFactory
from coppice_scheduler.edge.engine import Engine, ModelInfo, RequestRefused
from coppice_scheduler.edge.errors import ApiError, ErrorKind, from_refused, model_not_found, not_ready
from coppice_scheduler.edge.generation_spec import GenerationSpec
from coppice_scheduler.edge.metrics import FrontDoorMetrics
from coppice_scheduler.edge.stops import StopScanner
from coppice_scheduler.edge.text_stream import NO_USAGE, Delta, TextStream, Usage
from coppice_scheduler.edge.tokenizer import Tokenizer, unpack_tokens
from coppice_scheduler.edge.tracing import CallSpan

_MERGED_DELTAS_MAX = 64  # waiting for a slow reader of several prompts; then the prompts wait
_PROMPT_TAIL_BYTES = 4 * 16


class FrontDoor:
    """Serves one model to all tenants."""

    def __init__(
        self, engine: Engine, checkpoint: CheckpointText, tenants: TenantDirectory, metrics: FrontDoorMetrics
    ) -> None:
        self._engine = engine
        self._tenants = tenants
        self._metrics = metrics
        self._defaults = checkpoint.defaults
        self._eos_token_ids = checkpoint.eos_token_ids
        self._detokenizers = DetokenizerFactory(checkpoint.raw)
        self._prompts = PromptReader(
            Tokenizer(checkpoint), ChatTemplate(checkpoint), engine.model, checkpoint.defaults.max_new_tokens
        )

    @property
    def model(self) -> ModelInfo:
        return self._engine.model

    @property
    def ready(self) -> bool:
        return self._engine.ready

    def tenant_of(self, bearer: str | None) -> Tenant:
        """Raises ApiError (UNAUTHENTICATED)."""
        tenant = self._tenants.authenticate(bearer)
        if tenant is None:
            message = (
                "An API key is needed: send `Authorization: Bearer KEY`."
                if bearer is None
                else "The API key is not known here."
            )
            raise ApiError(ErrorKind.UNAUTHENTICATED, message, code="invalid_api_key")
        return tenant

    async def open(self, tenant: Tenant, spec: GenerationSpec, parent: Context | None = None) -> Call:
        """Check everything that needs no engine, and tokenise. Raises ApiError; nothing is reserved yet."""
        arrived_ns = time.monotonic_ns()
        if spec.model != self.model.id:
            raise model_not_found(spec.model, self.model.id)
        call_id = f"{'chatcmpl' if spec.is_chat else 'cmpl'}-{uuid4().hex}"
        span = CallSpan(spec, self.model.id, call_id, tenant.id, parent)
        try:
            check_stops(spec, self._prompts.vocab_size)
            sampling = sampling_of(spec, self._defaults)
            if not self._engine.accepts:
                raise not_ready()
            admitted = await self._prompts.admit(spec)
        except BaseException as error:
            code = _code_of(error)
            self._metrics.failed(tenant.id, code, 0)
            span.end(NO_USAGE, (), code)
            raise
        return Call(
            call_id=call_id,
            prompts=admitted,
            _runs=tuple(
                _Run(
                    engine=self._engine,
                    metrics=self._metrics,
                    request=replace(
                        self._request(f"{call_id}-{index}", tenant, spec, sampling, prompt, arrived_ns),
                        traceparent=span.traceparent,
                    ),
                    span=span,
                    make_stream=self._stream_maker(index, prompt, spec),
                )
                for index, prompt in enumerate(admitted)
            ),
            _span=span,
        )

    def _request(
        self,
        request_id: str,
        tenant: Tenant,
        spec: GenerationSpec,
        sampling: SamplingParams,
        prompt: Admitted,
        arrived_ns: int,
    ) -> Request:
        ends = frozenset(spec.stop_token_ids)
        return Request(
            request_id=request_id,
            tenant=tenant.id,
            domain=tenant.domain,
            tokens=prompt.tokens,
            sampling=sampling,
            max_new_tokens=prompt.max_new_tokens,
            stop_token_ids=ends if spec.ignore_eos else ends | self._eos_token_ids,
            arrived_ns=arrived_ns,
        )

    def _stream_maker(
        self, index: int, prompt: Admitted, spec: GenerationSpec
    ) -> Callable[[Callable[[], None]], TextStream]:
        def make(stop_now: Callable[[], None]) -> TextStream:
            detokenizer = self._detokenizers.start(unpack_tokens(prompt.tokens[-_PROMPT_TAIL_BYTES:]))
            scanner = StopScanner(spec.stop) if spec.stop else None
            return TextStream(index, prompt.num_prompt_tokens, detokenizer, scanner, stop_now)

        return make


@dataclass(frozen=True, slots=True)
class Call:
    """One admitted call. Iterate `deltas()` once, inside `aclosing`; until then nothing runs."""

    call_id: str
    prompts: tuple[Admitted, ...]
    _runs: tuple[_Run, ...]
    _span: CallSpan

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Text as it comes, of all prompts. Raises ApiError, on the first iteration when the core refuses."""
        usage, reasons = NO_USAGE, []
        error: str | None = "cancelled"  # until we know better: closed by the caller
        try:
            async with aclosing(_merge(self._runs)) as merged:
                async for delta in merged:
                    if delta.ending is not None:
                        usage += delta.ending.usage
                        reasons.append(delta.ending.reason)
                    yield delta
            error = None
        except BaseException as raised:
            error = _code_of(raised)
            raise
        finally:
            self._span.end(usage, reasons, error)


@dataclass(frozen=True, slots=True)
class _Run:
    """One prompt of a call."""

    engine: Engine
    metrics: FrontDoorMetrics
    request: Request
    span: CallSpan
    make_stream: Callable[[Callable[[], None]], TextStream]

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        stream = self.make_stream(lambda: self.engine.finish(self.request.request_id))
        clock = _Clock(self.metrics, self.request)
        code: str | None = "cancelled"
        try:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    clock.saw(output, stream)
                    delta = stream.take(output)
                    if output.timeline:
                        self.span.timeline(output.timeline)
                    if delta is not None and delta.ending is not None:
                        clock.finished(delta.ending.reason, delta.ending.usage)
                        code = None
                        yield delta
                        return
                    if delta is not None:
                        yield delta
            raise ApiError(ErrorKind.INTERNAL, "The engine ended the request without a reason.", code="internal")
        except BaseException as error:
            code = _code_of(error) if code is not None else None
            raise
        finally:
            if code is not None:
                self.metrics.failed(self.request.tenant, code, stream.num_tokens)

    async def _outputs(self) -> AsyncGenerator[Output, None]:
        """The engine's outputs. The first step runs under the call's span, so that the engine can carry it on."""
        async with aclosing(self.engine.generate(self.request)) as outputs:
            try:
                with trace.use_span(self.span.span, record_exception=False, set_status_on_exception=False):
                    first = await anext(outputs)
            except RequestRefused as error:
                raise from_refused(error.refused) from error
            except StopAsyncIteration:
                return
            yield first
            async for output in outputs:
                yield output


class _Clock:
    """Latencies of one prompt."""

    def __init__(self, metrics: FrontDoorMetrics, request: Request) -> None:
        self._metrics = metrics
        self._request = request
        self._last_ns = 0

    def saw(self, output: Output, stream: TextStream) -> None:
        now_ns = time.monotonic_ns()
        num_tokens = len(output.tokens) // 4
        if not num_tokens and not output.stop_token:
            return
        if not stream.num_tokens and not self._last_ns:
            waited_s = (now_ns - self._request.arrived_ns) / 1e9
            self._metrics.first_token(self._request.tenant, waited_s, len(self._request.tokens) // 4)
        else:
            self._metrics.gap(self._request.tenant, (now_ns - self._last_ns) / 1e9, num_tokens)
        self._last_ns = now_ns

    def finished(self, reason: str, usage: Usage) -> None:
        whole_s = (time.monotonic_ns() - self._request.arrived_ns) / 1e9
        self._metrics.finished(self._request.tenant, whole_s, reason, usage.completion_tokens)


def _code_of(error: BaseException) -> str:
    if isinstance(error, ApiError):
        return error.code or error.kind.name.lower()
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return "cancelled"
    return "internal"


async def _merge(runs: tuple[_Run, ...]) -> AsyncGenerator[Delta, None]:
    """Deltas of all runs as they come. The first error ends all."""
    if len(runs) == 1:
        async with aclosing(runs[0].deltas()) as deltas:
            async for delta in deltas:
                yield delta
        return
    arrived: asyncio.Queue[Delta | Exception] = asyncio.Queue(_MERGED_DELTAS_MAX)
    tasks = [asyncio.create_task(_pump(run, arrived)) for run in runs]
    try:
        num_running = len(runs)
        while num_running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            num_running -= item.ending is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(run: _Run, into: asyncio.Queue[Delta | Exception]) -> None:
    try:
        async with aclosing(run.deltas()) as deltas:
            async for delta in deltas:
                await into.put(delta)
    except Exception as error:
        await into.put(error)
