"""An OTLP gRPC collector that keeps every span it is sent."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True)
class Link:
    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class Span:
    service: str
    scope: str  # of the instrumentation: ours or a library's
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    links: tuple[Link, ...]
    attributes: dict[str, Any]
    start_ns: int
    end_ns: int


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`credentials`: of a server that speaks TLS, for clients that call it localhost."""

    def __init__(self, address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        if credentials is None:
            self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port(address)}"
        else:
            self.endpoint = f"https://localhost:{self._server.add_secure_port(address, credentials)}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        spans = []
        for resource in request.resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            for scope in resource.scope_spans:
                spans += [_span(service, scope.scope.name, wire) for wire in scope.spans]
        with self._lock:
            self._spans += spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace_for(self, client_trace_id: str) -> list[Span]:
        """All spans of our traces that are linked to a client's."""
        with self._lock:
            ours = {span.trace_id for span in self._spans for link in span.links if link.trace_id == client_trace_id}
            return [span for span in self._spans if span.trace_id in ours]

    @property
    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def close(self) -> None:
        self._server.stop(0)


def _span(service: str, scope: str, wire: Any) -> Span:
    attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in wire.attributes}
    return Span(
        service=service,
        scope=scope,
        name=wire.name,
        trace_id=wire.trace_id.hex(),
        span_id=wire.span_id.hex(),
        parent_id=wire.parent_span_id.hex(),
        links=tuple(Link(link.trace_id.hex(), link.span_id.hex()) for link in wire.links),
        attributes=attributes,
        start_ns=wire.start_time_unix_nano,
        end_ns=wire.end_time_unix_nano,
    )
