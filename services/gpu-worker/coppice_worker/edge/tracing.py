"""Spans of a worker: one per prefill chunk of a traced request, one for its decoding. Each step that computed such a
chunk is a trace of its own, linked to all traced requests in it: who shared the step with whom.

A request's trace context comes with the plan that attaches it; untraced requests cost nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link

from coppice.messages.registration import Direction
from coppice.messages.step import StepPlan, StepResult
from coppice.telemetry.trace_context import context_from_traceparent
from coppice_worker.edge.runner import StepObserver


@dataclass(slots=True)
class _Traced:
    context: Context
    decode_started_ns: int = 0
    last_step_ns: int = 0
    num_decoded: int = 0


class WorkerSpans(StepObserver):
    """Observes steps on the step thread."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer
        self._traced: dict[int, _Traced] = {}

    def planned(self, plan: StepPlan) -> None:
        for start in plan.attach:
            if start.traceparent:
                self._traced[start.sequence_id] = _Traced(context_from_traceparent(start.traceparent))
        if self._traced and plan.detach:
            for sequence_id in memoryview(plan.detach).cast("I"):
                self._end(sequence_id)

    def cleared(self) -> None:
        for sequence_id in list(self._traced):
            self._end(sequence_id)

    def _end(self, sequence_id: int) -> None:
        traced = self._traced.pop(sequence_id, None)
        if traced is not None and traced.num_decoded:
            self._span(traced, "worker.decode", traced.num_decoded, traced.decode_started_ns, traced.last_step_ns)

    def computed(self, plan: StepPlan, result: StepResult, started_ns: int, ended_ns: int) -> None:
        if not self._traced:
            return
        counts = dict(zip(memoryview(plan.rows).cast("I"), memoryview(plan.row_tokens).cast("I"), strict=True))
        in_step: list[_Traced] = []
        has_chunk = False
        for sequence_id, traced in self._traced.items():
            num_tokens = 1 if plan.repeat_rows else counts.get(sequence_id, 0)
            if not num_tokens:
                continue
            in_step.append(traced)
            num_decoded = plan.num_decode_steps
            if num_tokens > 1 or not traced.last_step_ns:
                self._span(traced, "worker.prefill_chunk", num_tokens, started_ns, ended_ns)
                has_chunk = True
                num_decoded -= 1
            if num_decoded:
                traced.decode_started_ns = traced.decode_started_ns or started_ns
                traced.num_decoded += num_decoded
            traced.last_step_ns = ended_ns
        if has_chunk:
            self._step_span(in_step, counts, started_ns, ended_ns)

    def _step_span(self, traced: list[_Traced], counts: dict[int, int], started_ns: int, ended_ns: int) -> None:
        links = [Link(trace.get_current_span(one.context).get_span_context()) for one in traced]
        attributes = {"coppice.rows": len(counts), "coppice.tokens": sum(counts.values())}
        span = self._tracer.start_span(
            "worker.step", context=Context(), links=links, attributes=attributes, start_time=started_ns
        )
        span.end(end_time=ended_ns)

    def _span(self, traced: _Traced, name: str, num_tokens: int, started_ns: int, ended_ns: int) -> None:
        span = self._tracer.start_span(name, context=traced.context, start_time=started_ns)
        span.set_attribute("coppice.tokens", num_tokens)
        span.end(end_time=ended_ns)


class Observers(StepObserver):
    """Several observers as one."""

    def __init__(self, *observers: StepObserver) -> None:
        self._observers = observers

    def planned(self, plan: StepPlan) -> None:
        for observer in self._observers:
            observer.planned(plan)

    def cleared(self) -> None:
        for observer in self._observers:
            observer.cleared()

    def computed(self, plan: StepPlan, result: StepResult, started_ns: int, ended_ns: int) -> None:
        for observer in self._observers:
            observer.computed(plan, result, started_ns, ended_ns)

    def copied(self, direction: Direction, num_blocks: int, num_bytes: int, duration_ns: int) -> None:
        for observer in self._observers:
            observer.copied(direction, num_blocks, num_bytes, duration_ns)

    def copies_refused(self, count: int) -> None:
        for observer in self._observers:
            observer.copies_refused(count)
