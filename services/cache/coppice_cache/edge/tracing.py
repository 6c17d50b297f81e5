"""One span per acquire, in the trace of its request: domain, tokens found, answer. Never a token or a prompt."""

from __future__ import annotations

import time

from opentelemetry.trace import Tracer

from coppice.ids import TOKEN_BYTES
from coppice.messages.index import Acquire, Answer, Grant, NoCapacity, Op
from coppice.telemetry import Tracing, context_from_traceparent


class AcquireSpans:
    """An `OpObserver`. Without an exporter it does not watch, and costs one attribute look-up per batch."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._tracer: Tracer = tracing.tracer("coppice.cache")

    @property
    def is_watching(self) -> bool:
        return self._tracing.enabled

    def executed(self, ops: tuple[Op, ...], answers: tuple[Answer, ...], duration_ns: int) -> None:
        end_ns = time.time_ns()
        for op, answer in zip(ops, answers, strict=True):
            if isinstance(op, Acquire):
                self._span(op, answer, end_ns - duration_ns, end_ns)

    def _span(self, op: Acquire, answer: Answer, start_ns: int, end_ns: int) -> None:
        attributes: dict[str, str | int] = {
            "coppice.domain": op.domain,
            "coppice.lease": op.lease_id.hex(),
            "coppice.tokens": len(op.tokens) // TOKEN_BYTES,
            "coppice.answer": type(answer).__name__,
        }
        if isinstance(answer, Grant):
            attributes["coppice.worker"] = answer.worker_id
            attributes["coppice.cached_tokens"] = answer.num_cached_tokens
        elif isinstance(answer, NoCapacity):
            attributes["coppice.reason"] = answer.reason.value
        parent = context_from_traceparent(op.traceparent)
        self._tracer.start_span("cache.acquire", parent, attributes=attributes, start_time=start_ns).end(end_ns)
