"""One span per call with the GenAI attributes, and below it what became of it: the stages of its life, and why.

    client's traceparent  <--link, coppice.client.trace_id--  span of the call, root of a trace of ours

A client says what it likes in its `traceparent`: ids of others' traces, or that everything is to be recorded. So its
trace is not continued, and its sampled flag decides nothing; the operator's sampler does.

The core's marks are monotonic nanoseconds; spans want wall-clock ones. The offset is taken when the request ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, format_trace_id

from coppice.request_log.stages import Stage
from coppice.telemetry.trace_context import traceparent_of
from coppice_scheduler.core.state.request import Output
from coppice_scheduler.edge.base.errors import code_of, status_of
from coppice_scheduler.edge.frontend.generation_spec import GenerationSpec
from coppice_scheduler.edge.request_log.open_record import current_record
from coppice_scheduler.edge.text.text_stream import Usage

PROVIDER = "coppice"
CLIENT_TRACE_ID = "coppice.client.trace_id"  # for whoever searches with what a client told
_WALL_CLOCK_FROM_NS = 10**18  # 2001; a monotonic clock gets there after 31 years of uptime


class CallSpan:
    """The span of one call, from arrival to its last token. End it exactly once."""

    def __init__(self, spec: GenerationSpec, model: str, call_id: str, tenant: str, client: Context | None) -> None:
        """`client`: the trace context that came with the call; the span is linked to it."""
        self._tracer = trace.get_tracer("coppice.scheduler")
        operation = "chat" if spec.is_chat else "text_completion"
        attributes: dict[str, str | int | float] = {
            "gen_ai.operation.name": operation,
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
        links = []
        theirs = trace.get_current_span(client or Context()).get_span_context()
        if theirs.is_valid:
            attributes[CLIENT_TRACE_ID] = format_trace_id(theirs.trace_id)
            # The ids alone: a tracestate is free text of the client's.
            links.append(Link(SpanContext(theirs.trace_id, theirs.span_id, is_remote=True)))
        self.record = current_record()
        self._text_ns = 0
        self.span: Span = self._tracer.start_span(
            f"{operation} {model}", context=Context(), kind=SpanKind.SERVER, attributes=attributes, links=links
        )
        context = self.span.get_span_context()
        trace_id = format_trace_id(context.trace_id) if context.is_valid else ""
        self.record.opened(call_id, model, streams=spec.streams, trace=trace_id)

    @property
    def traceparent(self) -> str:
        """What the other services continue; empty when nothing is recorded."""
        return traceparent_of(trace.set_span_in_context(self.span)) if self.span.is_recording() else ""

    def life(self, last: Output) -> None:
        """Child spans of one answer: its stages, with who was in the way, and the chunks of its prompt. What has no
        length is an event."""
        self.record.life(last)
        if not self.span.is_recording():
            return
        offset = time.time_ns() - time.monotonic_ns()
        for stage in last.stages:
            if stage.length_ns:
                self._child(stage.kind.value, stage.start_ns, stage.end_ns, offset, _attributes(stage))
            else:
                self.span.add_event(stage.kind.value, _attributes(stage), _wall_ns(stage.start_ns, offset))
        for start_ns, end_ns, num_tokens in last.chunks:
            self._child("chunk", start_ns, end_ns, offset, {"coppice.amount": num_tokens})

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A child span of what is done within."""
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            if self.span.is_recording():
                self._child(name, start_ns, time.monotonic_ns(), time.time_ns() - time.monotonic_ns(), {})

    def _child(self, name: str, start_ns: int, end_ns: int, offset: int, attributes: Mapping[str, str | int]) -> None:
        context = trace.set_span_in_context(self.span)
        start_time = _wall_ns(start_ns, offset)
        child = self._tracer.start_span(name, context=context, attributes=attributes, start_time=start_time)
        child.end(_wall_ns(end_ns, offset))

    def made_text(self, took_ns: int) -> None:
        """Of one answer: the time that its tokens took to become text."""
        self._text_ns += took_ns

    def end(self, usage: Usage, reasons: Sequence[str], raised: BaseException | None) -> None:
        """`raised`: what the client is told instead of an end. Its text may be the client's; only its code is kept."""
        error = None if raised is None else code_of(raised)
        self.record.ended(usage, reasons, error, 200 if raised is None else status_of(raised))
        self.span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        self.span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        self.span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        self.span.set_attribute("gen_ai.usage.cache_creation.input_tokens", usage.written_tokens)
        self.span.set_attribute("gen_ai.response.finish_reasons", tuple(reasons))
        self.span.set_attribute("coppice.detokenize_us", self._text_ns // 1000)
        if error is not None:
            self.span.set_attribute("error.type", error)
            self.span.set_status(Status(StatusCode.ERROR, error))
        self.span.end()


def _attributes(stage: Stage) -> dict[str, str | int]:
    found: dict[str, str | int] = {}
    if stage.blocker:
        found["coppice.blocker"] = stage.blocker
    if stage.amount:
        found["coppice.amount"] = stage.amount
    return found


def _wall_ns(at_ns: int, offset_ns: int) -> int:
    return at_ns if at_ns > _WALL_CLOCK_FROM_NS else at_ns + offset_ns
