"""One span per call with the GenAI attributes, and below it what the core did: queue, acquire, prefill, decode.

    client's traceparent  <--link, coppice.client.trace_id--  span of the call, root of a trace of ours

A client says what it likes in its `traceparent`: ids of others' traces, or that everything is to be recorded. So its
trace is not continued, and its sampled flag decides nothing; the operator's sampler does.

The core's marks are monotonic nanoseconds; spans want wall-clock ones. The offset is taken when the request ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, format_trace_id

from coppice.telemetry.trace_context import traceparent_of
from coppice_scheduler.core.state.request import Mark
from coppice_scheduler.edge.frontend.generation_spec import GenerationSpec
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
        self.span: Span = self._tracer.start_span(
            f"{operation} {model}", context=Context(), kind=SpanKind.SERVER, attributes=attributes, links=links
        )

    @property
    def traceparent(self) -> str:
        """What the other services continue; empty when nothing is recorded."""
        return traceparent_of(trace.set_span_in_context(self.span)) if self.span.is_recording() else ""

    def timeline(self, marks: Iterable[Mark]) -> None:
        """Child spans of one prompt."""
        if not self.span.is_recording():
            return
        context = trace.set_span_in_context(self.span)
        offset = time.time_ns() - time.monotonic_ns()
        for name, start_ns, end_ns in marks:
            shift = 0 if start_ns > _WALL_CLOCK_FROM_NS else offset
            child = self._tracer.start_span(name, context=context, start_time=start_ns + shift)
            child.end(end_ns + shift)

    def end(self, usage: Usage, reasons: Iterable[str], error: str | None) -> None:
        """`error` is a short code such as `queue_timeout` or `cancelled`; never text of the client's."""
        self.span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        self.span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        self.span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        self.span.set_attribute("gen_ai.usage.cache_creation.input_tokens", usage.written_tokens)
        self.span.set_attribute("gen_ai.response.finish_reasons", tuple(reasons))
        if error is not None:
            self.span.set_attribute("error.type", error)
            self.span.set_status(Status(StatusCode.ERROR, error))
        self.span.end()
