"""Contexts of traces on their way between processes: gRPC metadata, HTTP headers, a field of a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_propagator = TraceContextTextMapPropagator()

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
