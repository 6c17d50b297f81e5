"""Spans are bounded, and lost rather than waited for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from coppice.errors import UsageError
from coppice.telemetry import traces
from coppice.telemetry.trace_context import context_from_metadata, traceparent_of
from coppice.telemetry.traces import PAUSE_MAX_S, _BoundedExport, configure_tracing, is_tracing, unsampled_tracer
from tests.fakes.waiting import wait_for


class CollectingExporter(SpanExporter):
    """Keeps names; blocks while `gate` is closed, as a collector that does not answer."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.gate.wait(60)
        self.names += [span.name for span in spans]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.gate.set()


@pytest.fixture(autouse=True)
def _own_global_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "set_tracer_provider", lambda provider: None)
    monkeypatch.setattr(traces, "_unsampled", None)


def test_what_no_sampler_is_asked_about_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    exporter = CollectingExporter()
    tracing = configure_tracing("coppice-test", None, instance_id="w0", exporter=exporter)
    assert is_tracing()
    tracing.tracer("a").start_span("left out").end()
    unsampled_tracer("a").start_span("kept").end()
    tracing()
    assert exporter.names == ["kept"]


def test_without_an_endpoint_nothing_is_traced() -> None:
    tracing = configure_tracing("coppice-test", None)
    with tracing.tracer("t").start_as_current_span("request") as span:
        assert not span.is_recording()
        assert traceparent_of() == ""
    tracing()
    assert not tracing.enabled


def test_spans_reach_the_exporter_with_the_service_name() -> None:
    exporter = CollectingExporter()
    tracing = configure_tracing("coppice-test", None, instance_id="w0", exporter=exporter)
    with tracing.tracer("t").start_as_current_span("request") as span:
        assert span.is_recording()
    tracing()
    assert exporter.names == ["request"]
    assert tracing.spans_dropped == 0


def test_a_collector_that_does_not_answer_costs_spans_not_requests() -> None:
    exporter = CollectingExporter()
    exporter.gate.clear()
    tracing = configure_tracing("coppice-test", None, exporter=exporter, spans_held_max=8)
    tracer = tracing.tracer("t")
    for _ in range(100):
        tracer.start_span("step").end()
    assert tracing.spans_dropped == 92
    exporter.gate.set()
    tracing()
    assert len(exporter.names) == 8


def test_a_dead_endpoint_is_said_once_and_its_return_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coppice.telemetry")
    results = [SpanExportResult.SUCCESS, *[SpanExportResult.FAILURE] * 3, *[SpanExportResult.SUCCESS] * 2]

    class Flaky(CollectingExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return results[int(spans[0].name)]

    processor = _BoundedExport(Flaky(), 8, pause_max_s=0)
    tracer = TracerProvider(shutdown_on_exit=False)
    tracer.add_span_processor(processor)
    for number in range(len(results)):
        tracer.get_tracer("t").start_span(str(number)).end()
        processor.force_flush()
    processor.shutdown()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "the OTLP endpoint does not take traces" in caplog.text
    assert processor.dropped == 3


def test_a_dead_collector_is_left_alone_for_a_while() -> None:
    tried = []

    class Dead(CollectingExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            tried.extend(span.name for span in spans)
            return SpanExportResult.FAILURE

    tracing = configure_tracing("coppice-test", None, exporter=Dead())
    begun = tracing.tracer("t").start_span("begun before")
    tracing.tracer("t").start_span("first").end()
    wait_for(lambda: tracing.spans_dropped == 1, "the export to fail")
    begun.end()
    for tracer in (tracing.tracer("t"), unsampled_tracer("t")):
        assert not tracer.start_span("left out").is_recording(), "nobody would take it"
    tracing()
    assert tried == ["first"]
    assert tracing.spans_dropped == 2


def test_one_span_tries_a_collector_that_was_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(traces, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    is_back = threading.Event()

    class Dead(CollectingExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            super().export(spans)
            return SpanExportResult.SUCCESS if is_back.is_set() else SpanExportResult.FAILURE

    exporter = Dead()
    tracing = configure_tracing("coppice-test", None, exporter=exporter)
    tracer = tracing.tracer("t")

    def tried(name: str, num_lost: int) -> None:
        """One goes, and while it is on its way no other is made."""
        exporter.gate.clear()
        now_s[0] += PAUSE_MAX_S + 1
        tracer.start_span(name).end()
        assert not tracer.start_span("left out").is_recording()
        exporter.gate.set()
        wait_for(lambda: exporter.names[-1] == name and tracing.spans_dropped == num_lost, "the export to end")

    tracer.start_span("first").end()
    wait_for(lambda: tracing.spans_dropped == 1, "the export to fail")
    tried("second", num_lost=2)
    tried("third", num_lost=3)
    is_back.set()
    tried("fourth", num_lost=3)
    wait_for(lambda: tracer.start_span("again").is_recording(), "spans to be made again")
    tracing()


def test_context_crosses_grpc_metadata() -> None:
    tracing = configure_tracing("coppice-test", None, exporter=CollectingExporter())
    with tracing.tracer("t").start_as_current_span("request") as span:
        metadata = (("authorization", "Bearer x"), ("traceparent", traceparent_of()))
    received = trace.get_current_span(context_from_metadata(metadata)).get_span_context()
    assert received.trace_id == span.get_span_context().trace_id
    assert received.is_remote
    tracing()


def test_an_endpoint_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="OTLP endpoint"):
        configure_tracing("coppice-test", "ftp://collector:4317")
