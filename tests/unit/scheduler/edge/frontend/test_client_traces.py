"""A client's trace context is linked to and decides nothing: neither our trace id, nor whether we record."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler

from coppice.telemetry.trace_context import context_from_headers, context_from_traceparent
from coppice_scheduler.edge.frontend.generation_spec import GenerationSpec, TextPrompt
from coppice_scheduler.edge.frontend.tracing import CLIENT_TRACE_ID, CallSpan
from coppice_scheduler.edge.text.text_stream import NO_USAGE

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def recorded(
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
    sampler: Sampler | None = None,
    max_tokens: int | None = None,
) -> tuple[list[ReadableSpan], str]:
    """The spans of a call that came with these headers, and what the other services are told."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    spec = GenerationSpec("m", (TextPrompt("x"),), max_tokens=max_tokens)
    span = CallSpan(spec, "m", "id", "tenant", context_from_headers(headers))
    told = span.traceparent
    span.end(NO_USAGE, (), None)
    return list(exporter.get_finished_spans()), told


@pytest.mark.parametrize("flags", ["00", "01"])
def test_a_call_is_a_trace_of_its_own_that_names_the_clients(monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-{flags}", "tracestate": "vendor=secret"}
    (span,), told = recorded(monkeypatch, headers)
    assert span.parent is None
    assert span.context is not None
    ours = f"{span.context.trace_id:032x}"
    assert ours != TRACE_ID
    assert told.split("-")[1] == ours
    assert int(told.split("-")[3], 16) & 1, "ours is recorded, whatever the client says of its own"
    (link,) = span.links
    assert (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert dict(span.attributes or {})[CLIENT_TRACE_ID] == TRACE_ID
    assert "secret" not in span.to_json()


def test_a_clients_sampled_flag_forces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
    assert recorded(monkeypatch, headers, ParentBased(ALWAYS_OFF)) == ([], "")


@pytest.mark.parametrize("traceparent", ["", "00-nonsense", f"00-{'0' * 32}-{SPAN_ID}-01"])
def test_without_a_context_there_is_nothing_to_link_to(monkeypatch: pytest.MonkeyPatch, traceparent: str) -> None:
    (span,), _ = recorded(monkeypatch, {"traceparent": traceparent})
    assert not span.links
    assert CLIENT_TRACE_ID not in dict(span.attributes or {})


def test_what_runs_in_a_span_of_ours_is_a_root_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the surroundings becomes the parent by chance."""
    outer = trace.get_current_span(context_from_traceparent(f"00-{TRACE_ID}-{SPAN_ID}-01"))
    with trace.use_span(outer):
        (span,), _ = recorded(monkeypatch, {})
    assert span.parent is None


@pytest.mark.parametrize(("max_tokens", "is_told"), [(5, True), (10**30, False)])
def test_a_number_that_no_span_can_have_is_left_out(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int, is_told: bool
) -> None:
    (span,), _ = recorded(monkeypatch, {}, max_tokens=max_tokens)
    assert ("gen_ai.request.max_tokens" in dict(span.attributes or {})) == is_told
