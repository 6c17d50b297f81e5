"""Logs, traces and the small metrics server of a process. Telemetry may lose itself; it never holds up a request.

    request thread --end()--> [ at most SPANS_HELD spans ] --one exporter thread--> OTLP
                       |
                       +-- full, or the collector does not answer: dropped and counted

Spans carry ids, counts and durations. Prompts, tokens and completions never go into a span or a log line.
"""

from __future__ import annotations

import logging
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from coppice import __version__
from coppice.errors import UnavailableError, UsageError
from coppice.tls.credentials import Credentials
from coppice.tls.identity import NoIdentity, identity_of
from coppice.tls.rights import why_not_rest

SPANS_HELD = 4096
SPANS_PER_EXPORT = 512
EXPORT_EVERY_MS = 1000
EXPORT_TIMEOUT_S = 2
SHUTDOWN_MS = 2000
PATIENCE_S = 10  # with whoever connects for metrics and does not go on

_log = logging.getLogger("coppice.telemetry")

LogLevel = str
_LEVELS = ("debug", "info", "warning", "error")
_propagator = TraceContextTextMapPropagator()


# --- logs ---------------------------------------------------------------------------------------------------------


class _OneLine(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING coppice.cache: text`; a traceback follows on lines of its own."""

    def __init__(self) -> None:
        self.converter = time.gmtime
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (the standard library's name)
        record.message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return super().formatMessage(record)


def configure_logging(level: LogLevel = "info") -> None:
    """Send logs of this process to stderr, one line each. `level`: debug, info, warning or error."""
    if level not in _LEVELS:
        raise UsageError(f"log level {level!r} is not known", hint=f"one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # The exporter logs each failed attempt with a stack; we say it once, and count.
    logging.getLogger("opentelemetry").setLevel("CRITICAL")


# --- traces -------------------------------------------------------------------------------------------------------


class _BoundedExport(SpanProcessor):
    """A batch processor behind a gate: spans beyond `held_max` waiting ones are dropped and counted.

    The SDK's own processor drops silently when full, and logs while it does; a gate in front keeps it below its bound.
    """

    def __init__(self, exporter: SpanExporter, held_max: int) -> None:
        self._held_max = held_max
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
            if self._held >= self._held_max:
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
        if changed and lost:
            _log.warning("the OTLP endpoint does not take traces; spans are dropped until it does")
        elif changed:
            _log.info("the OTLP endpoint takes traces again")


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
    exporter: SpanExporter | None = None,
    spans_held_max: int = SPANS_HELD,
) -> Tracing:
    """Export spans of this process to the OTLP gRPC `endpoint` (`http://host:4317`); without one, trace nothing.

    `service_name` is such as `coppice-worker`, `instance_id` such as the worker's name. `exporter` replaces OTLP in
    tests. Sets the global tracer provider when there is something to export to, so that `trace.get_tracer` works too.
    """
    if exporter is None:
        if not endpoint:
            return Tracing(trace.NoOpTracerProvider(), None)
        exporter = _otlp_exporter(endpoint)
    attributes = {"service.name": service_name, "service.namespace": "coppice", "service.version": __version__}
    if instance_id:
        attributes["service.instance.id"] = instance_id
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    processor = _BoundedExport(exporter, spans_held_max)
    provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    return Tracing(provider, processor)


def _otlp_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    secure = endpoint.startswith("https://")
    if "://" in endpoint and not secure and not endpoint.startswith("http://"):
        raise UsageError(f"OTLP endpoint {endpoint!r} is no gRPC address", hint="give http://HOST:4317 or HOST:4317")
    return OTLPSpanExporter(endpoint=endpoint, insecure=not secure, timeout=EXPORT_TIMEOUT_S)


Metadata = Sequence[tuple[str, str | bytes]]


class _MetadataGetter(Getter[Metadata]):
    def get(self, carrier: Metadata, key: str) -> list[str] | None:
        found = [value for name, value in carrier if name.lower() == key and isinstance(value, str)]
        return found or None

    def keys(self, carrier: Metadata) -> list[str]:
        return [name for name, _ in carrier]


def context_from_metadata(metadata: Metadata | None) -> Context:
    """The caller's trace context in gRPC metadata; an empty one when there is none or it is malformed."""
    return _propagator.extract(metadata or (), Context(), _MetadataGetter())


def traceparent_of(context: Context | None = None) -> str:
    """The W3C `traceparent` of `context`, for messages that carry it in a field; empty without a trace."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return carrier.get("traceparent", "")


def context_from_headers(headers: Mapping[str, str]) -> Context:
    """The caller's trace context in HTTP headers (names in any case)."""
    return context_from_metadata(tuple(headers.items()))


def context_from_traceparent(traceparent: str) -> Context:
    """The trace context of a `traceparent` value; an empty one for an empty or malformed value."""
    return context_from_metadata((("traceparent", traceparent),))


# --- metrics, health ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running `/metrics`, `/healthz`, `/readyz` server; `port` is the one that it really got."""

    host: str
    port: int
    _server: ThreadingHTTPServer
    _thread: threading.Thread

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(
    host: str,
    port: int,
    registry: CollectorRegistry,
    not_ready_because: Callable[[], Sequence[str]],
    *,
    notes: Callable[[], Sequence[str]] = tuple,
    flag: str = "--http-port",
    tls: Credentials | None = None,
) -> MetricsServer:
    """Serve metrics of `registry` from threads of their own. Port 0 takes a free one; `flag` set it, for the message.

    `/healthz` answers 200 while the process lives; `/readyz` answers 503 with the reasons that `not_ready_because`
    gives, 200 when it gives none; `notes` are more lines for whoever reads it. With `tls` all of it is for those alone
    who show a certificate of the stack, of any role. Raises UnavailableError when the port cannot be had.
    """

    class Handler(_MetricsHandler):
        pass

    Handler.registry = registry
    Handler.not_ready_because = staticmethod(not_ready_because)
    Handler.notes = staticmethod(notes)
    try:
        server = _Server((host, port), Handler)
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {host}:{port} for metrics: {error.strerror}", hint=f"choose another {flag}"
        ) from error
    server.context = tls.listening_context() if tls is not None else None
    thread = threading.Thread(target=server.serve_forever, name="metrics-http", daemon=True)
    thread.start()
    return MetricsServer(host=host, port=server.server_address[1], _server=server, _thread=thread)


class _Server(ThreadingHTTPServer):
    """`context`: connections shake hands first, each in its own thread, so that nobody waits for one that does not."""

    daemon_threads = True
    context: ssl.SSLContext | None = None

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(PATIENCE_S)
        try:
            with request if self.context is None else self.context.wrap_socket(request, server_side=True) as connection:
                super().finish_request(connection, client_address)
        except OSError:
            pass  # who hangs up, or cannot shake hands, is not worth a traceback


class _MetricsHandler(BaseHTTPRequestHandler):
    registry: CollectorRegistry
    not_ready_because: Callable[[], Sequence[str]]
    notes: Callable[[], Sequence[str]]
    protocol_version = "HTTP/1.1"
    server_version = "coppice"
    sys_version = ""  # versions are nobody's business
    timeout = PATIENCE_S

    def do_GET(self) -> None:
        path = self.path.split("?", 1)[0]
        if why_not := self._why_not(path):
            self._answer(403, why_not.encode() + b"\n", "text/plain; charset=utf-8")
        elif path == "/metrics":
            self._answer(200, generate_latest(self.registry), CONTENT_TYPE_LATEST)
        elif path == "/healthz":
            self._answer(200, b"ok\n", "text/plain; charset=utf-8")
        elif path == "/readyz":
            reasons = self.not_ready_because()
            body = "\n".join([*(reasons or ["ready"]), *self.notes()])
            self._answer(503 if reasons else 200, body.encode() + b"\n", "text/plain; charset=utf-8")
        else:
            self._answer(404, b"known: /metrics /healthz /readyz\n", "text/plain; charset=utf-8")

    do_HEAD = do_GET  # noqa: N815  (the standard library's name; load balancers probe with HEAD)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a log line each."""

    def _why_not(self, path: str) -> str:
        """Why whoever shook hands may not ask for this; empty when it may, as all may without TLS."""
        if not isinstance(self.connection, ssl.SSLSocket):
            return ""
        try:
            return why_not_rest(identity_of(self.connection.getpeercert()), path)
        except NoIdentity:
            return "the certificate names nobody"

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
