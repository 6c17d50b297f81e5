"""Spans of a process, sent over OTLP. Those that nobody takes are lost; no request waits for them.

    request thread --end()--> [ at most SPANS_HELD spans ] --one exporter thread--> OTLP
                       |
                       +-- full, or the collector did not answer a moment ago: dropped and counted

Spans carry ids, counts and durations. Prompts, tokens and completions never go into one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState
from opentelemetry.util.types import Attributes

from coppice import __version__
from coppice.errors import UsageError
from coppice.tls.credentials import Credentials

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig

SPANS_HELD = 4096
SPANS_PER_EXPORT = 512
EXPORT_EVERY_MS = 1000
EXPORT_TIMEOUT_S = 2
PAUSE_MAX_S = 10.0
SHUTDOWN_MS = 2000
_OTLP_CA_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE")  # of a foreign CA

# For `FastAPI(telemetry=...)`. Its own spans are beside those of requests, show queries, and know nothing of gRPC; its
# logs tell what clients sent.
NO_TELEMETRY_OF_FASTAPI: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}

_log = logging.getLogger("coppice.telemetry")


class _BoundedExport(SpanProcessor):
    """A batch processor behind a gate: spans beyond `held_max` waiting ones are dropped and counted.

    The SDK's own processor drops silently when full, and logs while it does; a gate in front keeps it below its bound.
    After an export that failed the gate is shut for a second, then two, up to `pause_max_s`. Then one span goes to
    try it, and the gate stays shut for all others until the collector has taken it.
    """

    def __init__(self, exporter: SpanExporter, held_max: int, pause_max_s: float = PAUSE_MAX_S) -> None:
        self._held_max = held_max
        self._pause_max_s = pause_max_s
        self._pause_s = 0.0
        self._opens_s = 0.0
        self._lock = threading.Lock()
        self._held = 0
        self._dropped = 0
        self._is_failing = False
        self._batch = BatchSpanProcessor(
            _CountingExporter(exporter, self._note_exported),
            max_queue_size=held_max,
            schedule_delay_millis=EXPORT_EVERY_MS,
            max_export_batch_size=min(SPANS_PER_EXPORT, held_max),
        )

    @property
    def is_shut(self) -> bool:
        return self._is_failing and (self._held > 0 or time.monotonic() < self._opens_s)

    @property
    def dropped(self) -> int:
        """Spans lost so far: no room, or an export that failed."""
        return self._dropped

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing to do: spans are sent when they end."""

    def on_end(self, span: ReadableSpan) -> None:
        context = span.context
        if context is None or not context.trace_flags.sampled:
            return
        with self._lock:
            if self._held >= self._held_max or self.is_shut:
                self._dropped += 1
                return
            self._held += 1
        self._batch.on_end(span)

    def shutdown(self) -> None:
        self._batch.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = SHUTDOWN_MS) -> bool:
        return bool(self._batch.force_flush(timeout_millis))

    def _note_exported(self, count: int, *, lost: int) -> None:
        with self._lock:
            self._held -= count
            self._dropped += lost
            changed = self._is_failing != bool(lost)
            self._is_failing = bool(lost)
            self._pause_s = min(max(1.0, 2 * self._pause_s), self._pause_max_s) if lost else 0.0
            self._opens_s = time.monotonic() + self._pause_s
        if changed and lost:
            _log.warning("the OTLP endpoint does not take traces; spans are dropped until it does")
        elif changed:
            _log.info("the OTLP endpoint takes traces again")


class _WhileTaken(Sampler):
    """No spans are made while the gate is shut: with a dead collector they took 1 % of a small machine's processors."""

    def __init__(self, inner: Sampler, processor: _BoundedExport) -> None:
        self._inner = inner
        self._processor = processor

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if self._processor.is_shut:
            return SamplingResult(Decision.DROP)
        return self._inner.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return self._inner.get_description()


class _CountingExporter(SpanExporter):
    def __init__(self, inner: SpanExporter, note: Callable[..., None]) -> None:
        self._inner = inner
        self._note = note

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            self._note(len(spans), lost=0 if result is SpanExportResult.SUCCESS else len(spans))
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class Tracing:
    """What `configure_tracing` set up. Call it to shut down: it flushes for at most two seconds."""

    def __init__(self, provider: trace.TracerProvider, processor: _BoundedExport | None) -> None:
        self._provider = provider
        self._processor = processor

    @property
    def enabled(self) -> bool:
        return self._processor is not None

    @property
    def spans_dropped(self) -> int:
        """Spans that were lost because nobody took them in time."""
        return self._processor.dropped if self._processor is not None else 0

    def tracer(self, name: str) -> trace.Tracer:
        """A tracer of this set-up; spans of a disabled one cost next to nothing and go nowhere."""
        return self._provider.get_tracer(name, __version__)

    def __call__(self) -> None:
        if self._processor is None:
            return
        # The exporter's own shutdown may wait on an unreachable collector for longer than a user waits on Ctrl-C.
        closing = threading.Thread(target=self._processor.shutdown, daemon=True, name="telemetry-shutdown")
        closing.start()
        closing.join(SHUTDOWN_MS / 1000)


def configure_tracing(
    service_name: str,
    endpoint: str | None,
    *,
    instance_id: str = "",
    tls: Credentials | None = None,
    exporter: SpanExporter | None = None,
    spans_held_max: int = SPANS_HELD,
) -> Tracing:
    """Export spans of this process to the OTLP gRPC `endpoint` (`http://host:4317`); without one, trace nothing.

    At `https://host:4317` the collector sees the certificate of `tls`, and has one of the same CA that names its host.
    `service_name` is such as `coppice-worker`, `instance_id` such as the worker's name. `exporter` replaces OTLP in
    tests. Sets the global tracer provider when there is something to export to, so that `trace.get_tracer` works too.
    """
    if exporter is None:
        if not endpoint:
            return Tracing(trace.NoOpTracerProvider(), None)
        exporter = _otlp_exporter(endpoint, tls)
    attributes = {"service.name": service_name, "service.namespace": "coppice", "service.version": __version__}
    if instance_id:
        attributes["service.instance.id"] = instance_id
    resource = Resource.create(attributes)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    unsampled = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
    processor = _BoundedExport(exporter, spans_held_max)
    for one in (provider, unsampled):
        one.sampler = _WhileTaken(one.sampler, processor)
        one.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    global _unsampled
    _unsampled = unsampled
    return Tracing(provider, processor)


_unsampled: trace.TracerProvider | None = None


def is_tracing() -> bool:
    """Whether spans of this process are exported at all."""
    return _unsampled is not None


def unsampled_tracer(name: str) -> trace.Tracer:
    """Makes spans that no sampler is asked about, for what turned out to be worth one."""
    return (_unsampled or trace.NoOpTracerProvider()).get_tracer(name, __version__)


def _otlp_exporter(endpoint: str, tls: Credentials | None) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    secure = endpoint.startswith("https://")
    if "://" in endpoint and not secure and not endpoint.startswith("http://"):
        raise UsageError(f"OTLP endpoint {endpoint!r} is no gRPC address", hint="give http://HOST:4317 or HOST:4317")
    if secure and tls is not None and not any(os.environ.get(name) for name in _OTLP_CA_VARIABLES):
        return _ReloadedExporter(endpoint, tls)
    if tls is not None and not secure:
        _log.warning("spans go to %s without TLS; https:// sends them under the certificate of this process", endpoint)
    return OTLPSpanExporter(endpoint=endpoint, insecure=not secure, timeout=EXPORT_TIMEOUT_S)


class _ReloadedExporter(SpanExporter):
    """Shows the collector the certificate of this process as it is now: a channel of gRPC keeps what it began with."""

    def __init__(self, endpoint: str, tls: Credentials) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._pem = tls.pem()
        self._inner = self._made()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        pem = self._tls.pem()
        if pem != self._pem:
            old, self._pem = self._inner, pem
            self._inner = self._made()
            old.shutdown()
        return self._inner.export(spans)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def _made(self) -> SpanExporter:
        import grpc
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        certificate, key, ca = self._pem
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        return OTLPSpanExporter(endpoint=self._endpoint, credentials=credentials, timeout=EXPORT_TIMEOUT_S)
