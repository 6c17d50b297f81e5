"""One span per call with the GenAI attributes, and below it what became of it: the stages of its life, and why.

    client's traceparent  <--link, coppice.client.trace_id--  span of the call, root of a trace of ours

A client says what it likes in its `traceparent`: ids of others' traces, or that everything is to be recorded. So its
trace is not continued, and its sampled flag decides nothing; the operator's sampler does.

Of the calls that the sampler leaves out, those that fail and those whose first token is late become spans when they
end, but no more of them than `KEPT_PER_S`: what clients send does not decide how much is traced. By then the other
services have been told nothing, so such a trace has what the front door knows: the stages, and why.

The core's marks are monotonic nanoseconds; spans want wall-clock ones. The offset is taken when the request ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, format_trace_id

from coppice.request_log.causes import NS_PER_MS, NS_PER_S
from coppice.request_log.stages import Stage
from coppice.telemetry.trace_context import traceparent_of
from coppice.telemetry.traces import is_tracing, unsampled_tracer
from coppice_scheduler.core.state.request import Output
from coppice_scheduler.edge.base.errors import code_of, status_of
from coppice_scheduler.edge.frontend.generation_spec import GenerationSpec
from coppice_scheduler.edge.request_log.open_record import current_record
from coppice_scheduler.edge.text.text_stream import Usage

PROVIDER = "coppice"
DEFAULT_SLOW_MS = 1000
_OUT_OF_TIME = 504
_NAME = "coppice.scheduler"
CLIENT_TRACE_ID = "coppice.client.trace_id"  # for whoever searches with what a client told
KEPT = "coppice.kept"  # why it is traced, though the sampler left it out: it was slow, or failed
_WALL_CLOCK_FROM_NS = 10**18  # 2001; a monotonic clock gets there after 31 years of uptime


KEPT_PER_S = 10  # calls of a front door
_KEPT_AT_ONCE = 20


class Allowance:
    """So many a second, and some more at once."""

    def __init__(self, per_s: int = KEPT_PER_S, at_once: int = _KEPT_AT_ONCE) -> None:
        self._step_ns = NS_PER_S // per_s
        self._saved_ns = at_once * self._step_ns
        self._taken_until_ns = 0

    def take(self, now_ns: int) -> bool:
        begun_ns = max(self._taken_until_ns, now_ns - self._saved_ns)
        if begun_ns + self._step_ns > now_ns:
            return False
        self._taken_until_ns = begun_ns + self._step_ns
        return True


_allowance = Allowance()


class _Part(NamedTuple):
    """What becomes a child span; an event, if it has no length."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int]


class CallSpan:
    """The span of one call, from arrival to its last token. End it exactly once."""

    def __init__(
        self,
        spec: GenerationSpec,
        model: str,
        call_id: str,
        tenant: str,
        client: Context | None,
        slow_ms: int = DEFAULT_SLOW_MS,
    ) -> None:
        """`client`: the trace context that came with the call; the span is linked to it. A call whose first token
        takes `slow_ms` is slow."""
        self._tracer = trace.get_tracer(_NAME)
        self._name = f"{'chat' if spec.is_chat else 'text_completion'} {model}"
        self._attributes = _asked(spec, model, call_id, tenant)
        self._slow_ns = slow_ms * NS_PER_MS
        self._links = []
        theirs = trace.get_current_span(client or Context()).get_span_context()
        if theirs.is_valid:
            self._attributes[CLIENT_TRACE_ID] = format_trace_id(theirs.trace_id)
            # The ids alone: a tracestate is free text of the client's.
            self._links.append(Link(SpanContext(theirs.trace_id, theirs.span_id, is_remote=True)))
        self.record = current_record()
        self._text_ns = 0
        self._parts: list[_Part] = []
        self._began_ns = time.monotonic_ns()
        self.span = self._begun(self._tracer)
        is_sampled = self.span.is_recording()
        self._may_be_kept = not is_sampled and is_tracing()
        self._keeps_parts = is_sampled or self._may_be_kept
        self.record.opened(call_id, model, streams=spec.streams, trace=_trace_id(self.span) if is_sampled else "")

    def _begun(self, tracer: trace.Tracer, start_ns: int | None = None) -> Span:
        return tracer.start_span(
            self._name,
            context=Context(),
            kind=SpanKind.SERVER,
            attributes=self._attributes,
            links=self._links,
            start_time=start_ns,
        )

    @property
    def traceparent(self) -> str:
        """What the other services continue; empty when nothing is recorded."""
        return traceparent_of(trace.set_span_in_context(self.span)) if self.span.is_recording() else ""

    def life(self, last: Output) -> None:
        """Of one answer: its stages, with who was in the way, and the chunks of its prompt."""
        self.record.life(last)
        if self._keeps_parts:
            self._parts += [_Part(one.kind.value, one.start_ns, one.end_ns, _attributes(one)) for one in last.stages]
            self._parts += [
                _Part("chunk", start_ns, end_ns, {"coppice.amount": num_tokens})
                for start_ns, end_ns, num_tokens in last.chunks
            ]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A child span of what is done within."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            if self._keeps_parts:
                self._parts.append(_Part(name, start_ns, time.monotonic_ns(), {}))

    def made_text(self, took_ns: int) -> None:
        """Of one answer: the time that its tokens took to become text."""
        self._text_ns += took_ns

    def end(self, usage: Usage, reasons: Sequence[str], raised: BaseException | None) -> None:
        """`raised`: what the client is told instead of an end. Its text may be the client's; only its code is kept."""
        error = None if raised is None else code_of(raised)
        status = 200 if raised is None else status_of(raised)
        offset = time.time_ns() - time.monotonic_ns()
        span = self._kept(status, offset)
        self.record.ended(usage, reasons, error, status)
        if not span.is_recording():
            return
        self._tell_parts(span, offset)
        span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        span.set_attribute("gen_ai.usage.cache_creation.input_tokens", usage.written_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", tuple(reasons))
        span.set_attribute("coppice.detokenize_us", self._text_ns // 1000)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()

    def _kept(self, status: int, offset: int) -> Span:
        """The span, or the one that it gets now."""
        why = self._why_kept(status) if self._may_be_kept else ""
        if not why or not _allowance.take(time.monotonic_ns()):
            return self.span
        self._attributes[KEPT] = why
        self._tracer = unsampled_tracer(_NAME)
        span = self._begun(self._tracer, self._began_ns + offset)
        self.record.traced(_trace_id(span))
        return span

    def _why_kept(self, status: int) -> str:
        """Empty where it is not. A call that ran out of its client's own time has not failed."""
        if status >= 500 and status != _OUT_OF_TIME:
            return "failed"
        return "slow" if self.record.waited_ns(self._began_ns) >= self._slow_ns else ""

    def _tell_parts(self, span: Span, offset: int) -> None:
        context = trace.set_span_in_context(span)
        for part in self._parts:
            start_time = _wall_ns(part.start_ns, offset)
            if part.end_ns <= part.start_ns:
                span.add_event(part.name, part.attributes, start_time)
                continue
            child = self._tracer.start_span(
                part.name, context=context, attributes=part.attributes, start_time=start_time
            )
            child.end(_wall_ns(part.end_ns, offset))


def _asked(spec: GenerationSpec, model: str, call_id: str, tenant: str) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {
        "gen_ai.operation.name": "chat" if spec.is_chat else "text_completion",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": call_id,
        "coppice.tenant": tenant,
    }
    optional = {
        "max_tokens": spec.max_tokens,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "frequency_penalty": spec.frequency_penalty or None,
        "presence_penalty": spec.presence_penalty or None,
        "choice.count": spec.n if spec.n != 1 else None,
    }
    for name, value in optional.items():
        # Nothing was checked yet, and a span with a number beyond 64 bits is a traceback in the log.
        if value is not None and abs(value) < 2**63:
            attributes[f"gen_ai.request.{name}"] = value
    return attributes


def _trace_id(span: Span) -> str:
    context = span.get_span_context()
    return format_trace_id(context.trace_id) if context.is_valid else ""


def _attributes(stage: Stage) -> dict[str, str | int]:
    found: dict[str, str | int] = {}
    if stage.blocker:
        found["coppice.blocker"] = stage.blocker
    if stage.amount:
        found["coppice.amount"] = stage.amount
    return found


def _wall_ns(at_ns: int, offset_ns: int) -> int:
    return at_ns if at_ns > _WALL_CLOCK_FROM_NS else at_ns + offset_ns
