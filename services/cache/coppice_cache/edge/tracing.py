"""Spans of acquire and release, in the trace of their request: domain, tokens found, answer. Never a token.

A request's trace context comes with its acquire; untraced requests cost nothing here, and have no trace of their own.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from coppice.ids import TOKEN_BYTES, LeaseId
from coppice.messages.index import Abandon, Acquire, Answer, Grant, NoCapacity, Op, Release
from coppice.telemetry.trace_context import context_from_traceparent
from coppice.telemetry.traces import Tracing

TRACED_LEASES_MAX = 10_000  # of expired ones the release never comes


class LeaseSpans:
    """An `OpObserver`. Without an exporter it does not watch, and costs one attribute look-up per batch."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._tracer: Tracer = tracing.tracer("coppice.cache")
        self._traced: OrderedDict[LeaseId, Context] = OrderedDict()  # leases whose release is still to come

    @property
    def is_watching(self) -> bool:
        return self._tracing.enabled

    def executed(self, ops: tuple[Op, ...], answers: tuple[Answer, ...], duration_ns: int) -> None:
        end_ns = time.time_ns()
        for op, answer in zip(ops, answers, strict=True):
            if isinstance(op, Acquire):
                if op.traceparent:
                    self._acquired(op, answer, end_ns - duration_ns, end_ns)
            elif isinstance(op, Release | Abandon) and op.lease_id in self._traced:
                parent = self._traced.pop(op.lease_id)
                span = self._tracer.start_span("cache.release", parent, start_time=end_ns - duration_ns)
                span.set_attribute("coppice.lease", op.lease_id.hex())
                span.end(end_ns)

    def _acquired(self, op: Acquire, answer: Answer, start_ns: int, end_ns: int) -> None:
        parent = context_from_traceparent(op.traceparent)
        attributes: dict[str, str | int] = {
            "coppice.domain": op.domain,
            "coppice.lease": op.lease_id.hex(),
            "coppice.tokens": len(op.tokens) // TOKEN_BYTES,
            "coppice.answer": type(answer).__name__,
        }
        if isinstance(answer, Grant):
            attributes["coppice.worker"] = answer.worker_id
            attributes["coppice.cached_tokens"] = answer.num_cached_tokens + answer.num_copy_tokens
            self._remember(op.lease_id, parent)
        elif isinstance(answer, NoCapacity):
            attributes["coppice.reason"] = answer.reason.value
        self._tracer.start_span("cache.acquire", parent, attributes=attributes, start_time=start_ns).end(end_ns)

    def _remember(self, lease_id: LeaseId, parent: Context) -> None:
        self._traced[lease_id] = parent
        while len(self._traced) > TRACED_LEASES_MAX:
            self._traced.popitem(last=False)
