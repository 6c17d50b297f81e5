"""Telemetry: contexts cross the wire, spans are bounded, the metrics server answers."""

from __future__ import annotations

import http.client
import logging
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, Gauge

from coppice import telemetry
from coppice.errors import UnavailableError, UsageError
from tests.fakes.certificates import Authority

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


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


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


def test_without_an_endpoint_nothing_is_traced() -> None:
    tracing = telemetry.configure_tracing("coppice-test", None)
    with tracing.tracer("t").start_as_current_span("request") as span:
        assert not span.is_recording()
        assert telemetry.traceparent_of() == ""
    tracing()
    assert not tracing.enabled


def test_spans_reach_the_exporter_with_the_service_name() -> None:
    exporter = CollectingExporter()
    tracing = telemetry.configure_tracing("coppice-test", None, instance_id="w0", exporter=exporter)
    with tracing.tracer("t").start_as_current_span("request") as span:
        assert span.is_recording()
    tracing()
    assert exporter.names == ["request"]
    assert tracing.spans_dropped == 0


def test_a_collector_that_does_not_answer_costs_spans_not_requests() -> None:
    exporter = CollectingExporter()
    exporter.gate.clear()
    tracing = telemetry.configure_tracing("coppice-test", None, exporter=exporter, spans_held_max=8)
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

    processor = telemetry._BoundedExport(Flaky(), 8)
    tracer = TracerProvider(shutdown_on_exit=False)
    tracer.add_span_processor(processor)
    for number in range(len(results)):
        tracer.get_tracer("t").start_span(str(number)).end()
        processor.force_flush()
    processor.shutdown()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "the OTLP endpoint does not take traces" in caplog.text
    assert processor.dropped == 3


def test_context_crosses_grpc_metadata() -> None:
    tracing = telemetry.configure_tracing("coppice-test", None, exporter=CollectingExporter())
    with tracing.tracer("t").start_as_current_span("request") as span:
        metadata = (("authorization", "Bearer x"), ("traceparent", telemetry.traceparent_of()))
    received = trace.get_current_span(telemetry.context_from_metadata(metadata)).get_span_context()
    assert received.trace_id == span.get_span_context().trace_id
    assert received.is_remote
    tracing()


def test_context_comes_from_headers_in_any_case() -> None:
    context = telemetry.context_from_headers({"TraceParent": TRACEPARENT})
    assert telemetry.traceparent_of(context) == TRACEPARENT
    assert telemetry.traceparent_of(telemetry.context_from_traceparent(TRACEPARENT)) == TRACEPARENT


@pytest.mark.parametrize("value", ["", "nonsense", "00-0-0-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_malformed_traceparent_is_no_context(value: str) -> None:
    assert telemetry.traceparent_of(telemetry.context_from_traceparent(value)) == ""


def test_an_endpoint_of_the_wrong_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="OTLP endpoint"):
        telemetry.configure_tracing("coppice-test", "ftp://collector:4317")


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_metrics_server_says_what_is_missing() -> None:
    registry = CollectorRegistry()
    Gauge("coppice_test_blocks", "Blocks.", registry=registry).set(3)
    reasons = ["not registered with the cache service"]
    server = telemetry.serve_metrics("127.0.0.1", 0, registry, lambda: reasons)
    try:
        assert "coppice_test_blocks 3.0" in get(server.port, "/metrics")[1]
        assert get(server.port, "/healthz")[0] == 200
        assert get(server.port, "/readyz") == (503, "not registered with the cache service\n")
        reasons.clear()
        assert get(server.port, "/readyz") == (200, "ready\n")
        assert get(server.port, "/readyz", "HEAD") == (200, "")
        assert get(server.port, "/nope")[0] == 404
        with pytest.raises(UnavailableError, match=f"127.0.0.1:{server.port}"):
            telemetry.serve_metrics("127.0.0.1", server.port, registry, list)
    finally:
        server.close()


def test_with_tls_metrics_are_for_whoever_has_a_certificate_of_the_stack(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "others").mkdir()
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    server = telemetry.serve_metrics("127.0.0.1", 0, CollectorRegistry(), tuple, tls=ours.credentials("worker", "w0"))

    def status(context: ssl.SSLContext) -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=60)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    try:
        silent = socket.create_connection(("127.0.0.1", server.port))
        assert status(ours.credentials("monitor", "p").client_context()) == 200, "nobody waits for the silent one"
        nobody = ssl.create_default_context(cafile=tmp_path / "ours" / "ca.pem")
        nobody.check_hostname = False
        assert status(nobody) == 0
        stranger = others.credentials("monitor", "prometheus").client_context()
        stranger.load_verify_locations(tmp_path / "ours" / "ca.pem")
        assert status(stranger) == 0
        with pytest.raises((OSError, http.client.HTTPException)):
            get(server.port, "/readyz")
        silent.close()
    finally:
        server.close()


def test_a_log_record_is_one_line(capfd: pytest.CaptureFixture[str], restored_logging: None) -> None:
    telemetry.configure_logging("warning")
    logging.getLogger("coppice.test").info("unseen")
    logging.getLogger("coppice.test").warning("two\nlines from %s", "w0")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("Z WARNING coppice.test: two\\nlines from w0")


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(UsageError, match="'loud'"):
        telemetry.configure_logging("loud")
