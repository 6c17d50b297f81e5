"""The front door without a framework: REST and gRPC both go through here, so they cannot differ.

    1 tenant_of(bearer), count_call(tenant)    who calls, and whether it has calls left this minute
    2 bodies.body(tenant), read(...)           its bytes, counted and bounded
    3 open(tenant, spec) -> Call               everything that can be refused without the engine
    4 Call.deltas() -> Delta, Delta, ...       engine -> tokens -> text -> stop strings -> usage

Each prompt gets `n` answers. The first is a request as any other; the rest are forks of it, which share its prefill.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from msgspec.structs import replace
from opentelemetry.context import Context

from coppice.messages.sampling import BIAS
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import Request, TenantLimitsLeft
from coppice_scheduler.edge.base.engine import Engine, ModelInfo
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind, code_of, invalid, not_ready
from coppice_scheduler.edge.base.metrics import FrontDoorMetrics
from coppice_scheduler.edge.base.request_id import RequestId, request_id_of
from coppice_scheduler.edge.base.tenant_model import ContextLimit, check_model, context_of, models_of
from coppice_scheduler.edge.beams.run import BeamRun
from coppice_scheduler.edge.beams.search import BeamOptions
from coppice_scheduler.edge.frontend.admission import (
    Admitted,
    PromptReader,
    call_kind_of,
    capped_retain_ms,
    check_width,
    deadline_ns_of,
    salt_of,
)
from coppice_scheduler.edge.frontend.body_budget import BodyBudget
from coppice_scheduler.edge.frontend.calls import Call, Run, abort_calls, outputs_of
from coppice_scheduler.edge.frontend.calls_by_key import CallsByKey
from coppice_scheduler.edge.frontend.door_limits import DoorLimits
from coppice_scheduler.edge.frontend.generation_spec import MAX_LOGIT_BIASES, GenerationSpec, Prompt
from coppice_scheduler.edge.frontend.grammar_check import GrammarCheck
from coppice_scheduler.edge.frontend.grammars.compiler import GrammarCompiler
from coppice_scheduler.edge.frontend.loop_share import LoopShare, units_to_open
from coppice_scheduler.edge.frontend.sampling_options import sampling_of, sampling_of_choice, stop_tokens_of
from coppice_scheduler.edge.frontend.text_work import SHORT_SIZE, TextWork
from coppice_scheduler.edge.frontend.tracing import DEFAULT_SLOW_MS, CallSpan
from coppice_scheduler.edge.request_log.budgets import Budgets
from coppice_scheduler.edge.request_log.open_record import current_record
from coppice_scheduler.edge.text.answer_syntax import AnswerSyntax
from coppice_scheduler.edge.text.chat import ChatTemplate
from coppice_scheduler.edge.text.checkpoint_text import CheckpointText
from coppice_scheduler.edge.text.detokenizer import DetokenizerFactory, TokenTexts
from coppice_scheduler.edge.text.logprobs import LogprobTrack, MeanLogprob, PromptLogprobs
from coppice_scheduler.edge.text.stops import StopScanner
from coppice_scheduler.edge.text.text_stream import NO_USAGE, Echo, TextOptions, TextStream, echo_of
from coppice_scheduler.edge.text.tokenizer import Tokenizer, unpack_tokens
from coppice_scheduler.edge.text.tools.tool import ToolUse
from coppice_scheduler.edge.text.tools.tool_support import AUTO

DEFAULT_MAX_RETAIN_MS = 30 * 60 * 1000
_PROMPT_TAIL_BYTES = 4 * 16

T = TypeVar("T")


class FrontDoor:
    """Serves one model to all tenants."""

    def __init__(
        self,
        engine: Engine,
        checkpoint: CheckpointText,
        tenants: TenantDirectory,
        metrics: FrontDoorMetrics,
        *,
        max_retain_ms: int = DEFAULT_MAX_RETAIN_MS,
        bodies: BodyBudget | None = None,
        budgets: Budgets | None = None,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        trace_slow_ms: int = DEFAULT_SLOW_MS,
    ) -> None:
        self.engine = engine
        self._calls = CallsByKey(engine, tenants)
        self.metrics = metrics
        self._max_retain_ms, self._trace_slow_ms = max_retain_ms, trace_slow_ms
        self._defaults = checkpoint.defaults
        self._eos_token_ids = checkpoint.eos_token_ids
        self._detokenizers = DetokenizerFactory(checkpoint.raw)
        self.token_texts = TokenTexts(checkpoint.raw)
        self._limits = DoorLimits()
        self._budgets = budgets or Budgets(None)
        self.bodies = bodies or BodyBudget()
        self.text_work = TextWork()
        self.loop_share = LoopShare()
        vocab_size = engine.model.vocab_size or checkpoint.raw.get_vocab_size(with_added_tokens=True)
        self._grammars = GrammarCheck(
            lambda: GrammarCompiler(checkpoint.raw.to_str(), vocab_size, checkpoint.eos_token_ids), self.text_work
        )
        template = ChatTemplate(checkpoint)
        self.template_variables = template.variables
        self.syntax = AnswerSyntax(checkpoint, template, tool_parser, reasoning_parser)
        self._prompts = PromptReader(
            Tokenizer(checkpoint),
            template,
            engine.model,
            checkpoint.defaults.max_new_tokens,
            self.text_work,
            self.syntax.reasoning,
        )

    def moved(self, request: Request) -> None:
        """The planner of a request at work was lost; another one goes on."""
        self.metrics.moved(request.tenant)
        self._calls.moved(request.request_id)

    def warm_up(self) -> None:
        """Loads what everybody would wait for, once, while the first call that needs it is read."""
        self._grammars.load()

    @property
    def model(self) -> ModelInfo:
        return self.engine.model

    @property
    def ready(self) -> bool:
        return self.engine.ready

    @property
    def notes(self) -> tuple[str, ...]:
        """What anybody may know of the tenants file; what is wrong with one is for the operator's port and the log."""
        version = self._calls.directory.version
        refused = ("a newer tenants file is refused",) if self.engine.tenants_refused else ()
        return (f"tenants file: version {version}", *refused) if version else ()

    def set_tenants(self, directory: TenantDirectory) -> None:
        """These count from now on. What runs with a key that is gone ends."""
        self._calls.replace(directory)

    def tenant_of(self, bearer: str | None) -> Tenant:
        """Raises ApiError (UNAUTHENTICATED)."""
        tenant = self._calls.directory.authenticate(bearer, datetime.now(UTC))
        if tenant is None:
            message = (
                "An API key is needed: send `Authorization: Bearer KEY`."
                if bearer is None
                else "The API key is not known here."
            )
            raise ApiError(ErrorKind.UNAUTHENTICATED, message, code="invalid_api_key")
        current_record().called_by(tenant)
        return tenant

    def count_call(self, tenant: Tenant) -> None:
        """Every call counts as one, before anything of it is read. Raises ApiError (BUSY)."""
        try:
            self._limits.count(tenant)
        except ApiError as error:
            self.metrics.failed(tenant.id, code_of(error), 0)
            raise

    def limits_left(self, tenant: Tenant) -> TenantLimitsLeft:
        """What is left of the tenant's limits per minute. What other front doors took was told a moment ago."""
        told = self.engine.stats().limits_left.get(tenant.id, TenantLimitsLeft(None, None))
        counted = [left for left in (self._limits.left(tenant), told.requests) if left is not None]
        return TenantLimitsLeft(min(counted, key=lambda left: left.left, default=None), told.tokens)

    async def abort(self, tenant: Tenant, asked: str) -> int:
        """End the tenant's calls of this id; how many answers ended. Raises ApiError (NOT_FOUND)."""
        return await abort_calls(self.engine, tenant, asked)

    async def read(self, tenant: Tenant, raw: bytes, parse: Callable[[bytes], T]) -> T:
        """What `parse` makes of a body, beside the loop where the body is large. Raises what `parse` raises."""
        if len(raw) <= SHORT_SIZE:
            return parse(raw)
        return await self.text_work.run(tenant.id, len(raw), lambda: parse(raw))

    def models_of(self, tenant: Tenant) -> tuple[ModelInfo, ...]:
        """That the tenant may ask for, as it may use them."""
        return models_of(self.model, tenant)

    def context_of(self, tenant: Tenant) -> ContextLimit:
        return context_of(self.model, tenant)

    def check_model(self, tenant: Tenant, asked: str | None) -> ModelInfo:
        """The model as the tenant may use it; None asks for what is served. Raises ApiError (NOT_FOUND)."""
        return check_model(self.model, tenant, asked)

    async def tokenize(self, tenant: Tenant, prompt: Prompt, field: str, *, add_special_tokens: bool) -> bytes:
        """Packed tokens of a prompt as a generation would have them. Raises ApiError; `field` is what it names."""
        context = self.context_of(tenant)
        return await self._prompts.tokens_of(tenant.id, prompt, field, context, add_special_tokens=add_special_tokens)

    async def detokenize(self, tenant: Tenant, tokens: bytes, field: str) -> str:
        """Text of packed tokens, special ones by their names. Raises ApiError."""
        self._prompts.check_ids(tokens, field)
        return await self.text_work.run(tenant.id, len(tokens), lambda: self._text_of(tokens))

    def _text_of(self, tokens: bytes) -> str:
        stream = self._detokenizers.start([], skip_special_tokens=False)
        return stream.feed(unpack_tokens(tokens)) + stream.flush()

    async def open(
        self,
        tenant: Tenant,
        spec: GenerationSpec,
        client: Context | None = None,
        request_id: RequestId | None = None,
    ) -> Call:
        """Check everything that needs no engine, and tokenise. Raises ApiError; nothing is reserved yet.

        `client`: the trace context that came with the call.
        """
        arrived_ns = time.monotonic_ns()
        self.check_model(tenant, spec.model)
        self._budgets.check(tenant, datetime.now(UTC))
        request_id = request_id or request_id_of(None)
        call_id = f"{'chatcmpl' if spec.is_chat else 'cmpl'}-{request_id.unique}"
        span = CallSpan(spec, self.model.id, call_id, tenant.id, client, self._trace_slow_ms)
        try:
            await self.loop_share.take(tenant.id, units_to_open(spec))
            spec, tool_use = await self._with_tools(tenant.id, spec)
            sampling = sampling_of(spec, self._defaults, self._eos_token_ids, self._prompts.vocab_size)
            deadline_ns = deadline_ns_of(spec, arrived_ns)
            salt = salt_of(spec, tenant.domain)
            check_width(spec, tenant)
            if not self.engine.accepts:
                raise not_ready()
            with span.part("tokenize"):
                admitted = await self._prompts.admit(tenant.id, spec, self.context_of(tenant))
            wanted = self.syntax.behind_reasoning(spec.output_format, admitted[0].opens_reasoning)
            spec = dataclasses.replace(spec, output_format=wanted)
            sampling = replace(sampling, grammar=await self._grammars.grammar_of(tenant.id, spec))
            echoes = await self._echoes(tenant.id, admitted, spec)
        except BaseException as error:
            self.metrics.failed(tenant.id, code_of(error), 0)
            span.end(NO_USAGE, (), error)
            raise
        whole = Request(
            request_id=call_id,
            tenant=tenant.id,
            domain=tenant.domain,
            tokens=b"",
            sampling=sampling,
            max_new_tokens=0,
            stop_token_ids=stop_tokens_of(spec, self._eos_token_ids),
            priority=spec.priority,
            arrived_ns=arrived_ns,
            traceparent=span.traceparent,
            # What ends it must be seen when it comes; an answer that nobody reads before its end may come whole.
            streams=(spec.streams and not spec.tells_the_best)
            or bool(spec.stop)
            or self.syntax.counts_tokens(spec.tool_use, is_chat=spec.is_chat),
            deadline_ns=deadline_ns,
            reuse=spec.reuse,
            call_kind=call_kind_of(spec),
            call_opens=None if tool_use is None else self.syntax.tools.opening_token(tool_use),
            retain_ms=capped_retain_ms(spec, tenant, self._max_retain_ms),
            names=request_id.names,
            salt=salt,
        )
        # What the client sent is not kept while the call runs.
        options = dataclasses.replace(spec, prompts=(), output_format=None, tool_use=tool_use)
        return Call(
            call_id=call_id,
            prompts=admitted,
            num_choices=spec.n,
            num_candidates=spec.n if spec.uses_beams else spec.num_candidates,
            shows_cached_tokens=tenant.shows_cached_tokens,
            _runs=tuple(self._runs(whole, admitted, echoes, options, span, tenant)),
            _span=span,
        )

    async def _with_tools(self, tenant: str, spec: GenerationSpec) -> tuple[GenerationSpec, ToolUse | None]:
        """With what the tools of a chat make of its options; and what the reader of calls needs. Raises ApiError."""
        use, tools = spec.tool_use, self.syntax.tools
        if use is None:
            return spec, None
        bias = dict(spec.logit_bias)
        forbidden = tools.forbidden_token(use)
        if forbidden is not None:
            bias[forbidden] = BIAS.low
            if len(bias) > MAX_LOGIT_BIASES:
                raise invalid(
                    'logit_bias must leave room for one entry beside tool_choice: "none".', param="logit_bias"
                )
        wanted, read = await self.text_work.run(
            tenant, use.num_chars, lambda: (tools.output_format(use, spec.output_format), tools.read_by(use))
        )
        return dataclasses.replace(spec, output_format=wanted, logit_bias=bias), read

    def _runs(
        self,
        whole: Request,
        prompts: tuple[Admitted, ...],
        echoes: Sequence[Echo | None],
        spec: GenerationSpec,
        span: CallSpan,
        tenant: Tenant,
    ) -> Iterator[Run | BeamRun]:
        """Requests in the order of the answers, so that the first choice of a prompt is submitted before its forks."""
        if spec.uses_beams:
            for place, prompt in enumerate(prompts):
                yield self._beam_run(whole, place, prompt, spec, span, tenant)
            return
        count, echoes_logprobs = spec.num_candidates, spec.echo and spec.num_logprobs is not None
        for place, prompt in enumerate(prompts):
            first = f"{whole.request_id}-{place * count}"
            for choice in range(count):
                index = place * count + choice
                request = replace(
                    whole,
                    request_id=f"{whole.request_id}-{index}",
                    tokens=prompt.tokens,
                    max_new_tokens=prompt.max_new_tokens,
                    sampling=sampling_of_choice(
                        whole.sampling, spec, index, choice, reports_prompt=not choice or echoes_logprobs
                    ),
                    # Log-probabilities of a prompt come from computing it: an answer that echoes them is no fork.
                    fork_of=first if choice and not echoes_logprobs else None,
                    num_to_come=len(prompts) * count - index,
                )
                # The last of a prompt's answers pays for all: they begin in one turn, and the forks find the first.
                units = count if choice == count - 1 else 0
                make_stream = self._stream_maker(index, prompt, echoes[place], spec, is_extra_choice=choice > 0)
                yield Run(
                    self.engine, self.metrics, request, span, make_stream, self._calls, tenant, self.loop_share, units
                )

    def _beam_run(
        self, whole: Request, place: int, prompt: Admitted, spec: GenerationSpec, span: CallSpan, tenant: Tenant
    ) -> BeamRun:
        makers = [
            self._stream_maker(place * spec.n + choice, prompt, None, spec, is_extra_choice=choice > 0)
            for choice in range(spec.n)
        ]
        return BeamRun(
            replace(whole, request_id=f"{whole.request_id}-{place * spec.n}", tokens=prompt.tokens),
            BeamOptions(spec.num_candidates, spec.length_penalty, prompt.max_new_tokens, whole.stop_token_ids),
            makers,
            lambda request: outputs_of(request, self.engine, self._calls, tenant, span),
            self.engine.finish,
            self.metrics,
            lambda: self.loop_share.take(tenant.id, spec.num_candidates),
            span.life,
        )

    def _stream_maker(
        self, index: int, prompt: Admitted, echo: Echo | None, spec: GenerationSpec, *, is_extra_choice: bool
    ) -> Callable[[Callable[[], None]], TextStream]:
        def make(stop_now: Callable[[], None]) -> TextStream:
            tail = unpack_tokens(prompt.tokens[-_PROMPT_TAIL_BYTES:])
            num_echoed = len(echo.text) if echo is not None else 0
            num_prompt_tokens = prompt.num_prompt_tokens
            tells_prompt = spec.num_prompt_logprobs is not None and not is_extra_choice
            wants_prompt = tells_prompt or (echo is not None and spec.num_logprobs is not None)
            parts = self.syntax.parts(spec.tool_use, prompt.opens_reasoning)
            return TextStream(
                index,
                num_prompt_tokens,
                self._detokenizers.start(
                    tail, skip_special_tokens=spec.skip_special_tokens, keeps_markers=parts is not None
                ),
                StopScanner(spec.stop, keeps_stop=spec.include_stop) if spec.stop else None,
                stop_now,
                track=LogprobTrack(num_prompt_tokens, num_echoed) if spec.num_logprobs is not None else None,
                prompt=PromptLogprobs(prompt.tokens) if wants_prompt else None,
                score=MeanLogprob(num_prompt_tokens) if spec.tells_the_best else None,
                parts=parts,
                options=TextOptions(
                    min_tokens=spec.min_tokens,
                    shows_output=spec.max_tokens != 0,
                    shows_stop_token=spec.include_stop,
                    is_extra_choice=is_extra_choice,
                    echo=echo,
                    tells_prompt=tells_prompt,
                ),
            )

        return make

    async def _echoes(self, tenant: str, prompts: tuple[Admitted, ...], spec: GenerationSpec) -> Sequence[Echo | None]:
        if not spec.echo:
            return [None] * len(prompts)

        def read() -> list[Echo]:
            return [
                echo_of(prompt.tokens, prompt.text, self._detokenizers, spec.num_logprobs, spec.skip_special_tokens)
                for prompt in prompts
            ]

        return await self.text_work.run(tenant, sum(len(prompt.tokens) for prompt in prompts), read)
