"""A client's trace context is linked to and decides nothing: neither our trace id, nor whether we record."""

from __future__ import annotations

import time

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler

from coppice.request_log.record import RequestRecord
from coppice.request_log.stages import Stage, StageKind
from coppice.telemetry.trace_context import context_from_headers, context_from_traceparent
from coppice_scheduler.core.state.request import Output
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind, invalid, not_ready
from coppice_scheduler.edge.frontend import tracing
from coppice_scheduler.edge.frontend.generation_spec import GenerationSpec, TextPrompt
from coppice_scheduler.edge.frontend.tracing import CLIENT_TRACE_ID, Allowance, CallSpan
from coppice_scheduler.edge.request_log.open_record import OpenRecord, begin
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


# --- calls that the sampler leaves out ------------------------------------------------------------------------------

S = 1_000_000_000
STAGES = (
    Stage(StageKind.POOL_FULL, 10 * S, 12 * S, "search", 412),
    Stage(StageKind.ASKED_BACK, 11 * S, 11 * S, "search", 100),
    Stage(StageKind.PREFILL, 12 * S, 13 * S),
)


class Kept:
    """Records and spans of calls; the sampler takes none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sampler: Sampler = ALWAYS_OFF) -> None:
        self.exporter = InMemorySpanExporter()
        self.records: list[RequestRecord] = []
        sampling, keeping = TracerProvider(sampler=sampler), TracerProvider()
        for provider in (sampling, keeping):
            provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        monkeypatch.setattr(trace, "get_tracer", sampling.get_tracer)
        monkeypatch.setattr(tracing, "unsampled_tracer", keeping.get_tracer)
        monkeypatch.setattr(tracing, "is_tracing", lambda: True)
        monkeypatch.setattr(tracing, "_allowance", Allowance(per_s=1, at_once=3))

    def write(self, record: RequestRecord) -> None:
        self.records.append(record)

    def call(self, raised: BaseException | None = None, slow_ms: int = 1000, waited_s: float = 0.0) -> None:
        record = begin(OpenRecord(self, "POST /v1/completions", "r-1"))
        span = CallSpan(GenerationSpec("m", (TextPrompt("x"),)), "m", "cmpl-1", "acme", None, slow_ms)
        assert bool(span.traceparent) == span.span.is_recording()
        with span.part("tokenize"):
            pass
        record.had_first_token(time.monotonic_ns() + int(waited_s * S))
        span.life(Output("cmpl-1", b"", stages=STAGES, chunks=((12 * S, 13 * S, 9),)))
        span.end(NO_USAGE, ("stop",) if raised is None else (), raised)

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.mark.parametrize(
    ("raised", "waited_s", "why"),
    [
        (not_ready(), 0.0, "failed"),
        (None, 1.5, "slow"),
        (invalid("no"), 0.0, None),
        (ApiError(ErrorKind.DEADLINE, "the client's own"), 0.0, None),
        (None, 0.5, None),
    ],
)
def test_who_fails_or_is_late_is_traced_though_nobody_wanted(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException | None, waited_s: float, why: str | None
) -> None:
    kept = Kept(monkeypatch)
    kept.call(raised, waited_s=waited_s)
    (record,) = kept.records
    if why is None:
        assert kept.spans() == {}
        assert record.trace == "", "it leads nowhere"
        return
    found = kept.spans()
    call = found["text_completion m"]
    assert call.context is not None
    assert record.trace == f"{call.context.trace_id:032x}"
    assert set(found) == {"text_completion m", "tokenize", "pool_full", "prefill", "chunk"}
    attributes = dict(call.attributes or {})
    assert (attributes["coppice.kept"], attributes["coppice.tenant"]) == (why, "acme")
    assert dict(found["pool_full"].attributes or {}) == {"coppice.blocker": "search", "coppice.amount": 412}
    assert [event.name for event in call.events] == ["asked_back"]
    assert call.start_time is not None
    assert call.end_time is not None
    assert call.start_time < call.end_time
    assert {one.parent.span_id for one in found.values() if one.parent} == {call.context.span_id}


def test_clients_do_not_decide_how_much_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(monkeypatch)
    for _ in range(9):
        kept.call(not_ready())
    assert len([record for record in kept.records if record.trace]) == 3
    assert len(kept.exporter.get_finished_spans()) == 3 * 5


def test_an_allowance_comes_back_with_time() -> None:
    allowance = Allowance(per_s=10, at_once=2)
    assert [allowance.take(100 * S) for _ in range(3)] == [True, True, False]
    assert [allowance.take(100 * S + S // 10) for _ in range(2)] == [True, False]
    assert [allowance.take(200 * S) for _ in range(3)] == [True, True, False]


def test_what_the_sampler_takes_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(monkeypatch, ALWAYS_ON)
    kept.call(waited_s=9)
    names = [span.name for span in kept.exporter.get_finished_spans()]
    assert names.count("text_completion m") == 1
    assert "coppice.kept" not in dict(kept.spans()["text_completion m"].attributes or {})
