"""FrontDoor without a network: spans, metrics, joined outputs, and ends of every kind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import coppice
from coppice.request_log.stages import Stage, StageKind
from coppice.tenants.directory import TenantDirectory
from coppice_scheduler.core.state.request import (
    Finish,
    Output,
    OutputError,
    OutputErrorCode,
    Refused,
    RefusedReason,
    Request,
)
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.base.metrics import MAX_TENANT_LABELS, OTHER, CappedLabels, FrontDoorMetrics
from coppice_scheduler.edge.base.request_id import RequestId
from coppice_scheduler.edge.frontend import tracing
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.frontend.generation_spec import (
    ChatPrompt,
    GenerationSpec,
    TextPrompt,
    TokenPrompt,
)
from coppice_scheduler.edge.text.chat import ChatMessage
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from coppice_scheduler.edge.text.detokenizer import DetokenizerFactory
from coppice_scheduler.edge.text.stops import StopScanner
from coppice_scheduler.edge.text.text_stream import Delta, TextStream, Usage
from tests.fakes.api.engine import FakeEngine, Script, pack

MODEL = "demo"
TENANTS = TenantDirectory.single_default()
TENANT = TENANTS.tenants[0]
CHECKPOINT = load_checkpoint_text(Path(coppice.__file__).parent / "demo_model")


class World:
    def __init__(self, engine: FakeEngine | None = None) -> None:
        self.engine = engine or FakeEngine(ModelInfo(MODEL, 512, 1))
        self.registry = CollectorRegistry()
        self.frontdoor = FrontDoor(self.engine, CHECKPOINT, TENANTS, FrontDoorMetrics(self.registry, MODEL))

    def ids(self, text: str) -> list[int]:
        return list(CHECKPOINT.raw.encode(text).ids)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"model_name": MODEL, "tenant": "default", **labels})

    async def deltas(self, spec: GenerationSpec, **of_tenant: object) -> list[Delta]:
        call = await self.frontdoor.open(TENANT.model_copy(update=of_tenant), spec)
        async with aclosing(call.deltas()) as deltas:
            return [delta async for delta in deltas]


def spec(text: str = "one", **fields: object) -> GenerationSpec:
    return replace(GenerationSpec(MODEL, (TextPrompt(text),)), **fields)  # type: ignore[arg-type]


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


# --- joined outputs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_output", [1, 2, 3, 100])
def test_the_answer_does_not_depend_on_how_outputs_were_joined(tokens_per_output: int) -> None:
    async def test() -> None:
        world = World()
        ids = world.ids("Wait for the word: forest. And never say it twice, forest.")
        world.engine.script = lambda request: Script(ids, tokens_per_output=tokens_per_output)
        deltas = await world.deltas(spec(stop=("forest",), max_tokens=200))
        assert "".join(delta.text for delta in deltas) == "Wait for the word: "
        tokens = b"".join(delta.tokens for delta in deltas)
        ending = deltas[-1].ending
        assert ending is not None
        assert (ending.reason, ending.stop) == ("stop", "forest")
        assert ending.usage.completion_tokens == len(tokens) // 4
        assert CHECKPOINT.raw.decode(list(memoryview(tokens).cast("I"))).rstrip(".").endswith("forest")
        assert [delta.ending for delta in deltas[:-1]] == [None] * (len(deltas) - 1)

    run(test)


def test_half_a_character_at_the_end_becomes_a_mark_not_silence() -> None:
    async def test() -> None:
        world = World()
        ids = world.ids("東")
        assert len(ids) > 1
        world.engine.script = lambda request: Script(ids[:-1])
        deltas = await world.deltas(spec())
        assert "".join(delta.text for delta in deltas) == "�"

    run(test)


def test_a_stop_string_that_only_the_end_completes() -> None:
    """The held-back tail is text when nothing follows, and a stop when the last token completes it."""

    async def test() -> None:
        world = World()
        world.engine.script = lambda request: Script(world.ids("abc User"))
        deltas = await world.deltas(spec(stop=("User:",), max_tokens=50))
        assert "".join(delta.text for delta in deltas) == "abc User"
        assert deltas[-1].ending is not None
        assert deltas[-1].ending.stop is None

    run(test)


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [((), "ab cd", None), (("cd",), "ab ", "cd"), (("b c",), "a", "b c"), (("x",), "ab cd", None)],
)
def test_tokens_in_the_last_output_count_too(stops: tuple[str, ...], text: str, stop: str | None) -> None:
    """A slow reader gets everything joined into one Output, its end included."""
    tokens = [CHECKPOINT.raw.token_to_id(piece) for piece in ("ab", "Ġc", "d")]
    assert None not in tokens
    finished: list[bool] = []
    stream = TextStream(
        0,
        7,
        DetokenizerFactory(CHECKPOINT.raw).start([]),
        StopScanner(stops) if stops else None,
        lambda: finished.append(True),
    )
    output = Output(
        "r", pack(tokens), finish=Finish.STOP, num_output_tokens=4, num_cached_tokens=1, stop_token=pack([9])
    )
    delta = stream.take(output)
    assert delta is not None
    assert delta.ending is not None
    assert (delta.text, delta.ending.stop, delta.ending.reason) == (text, stop, "stop")
    assert delta.ending.usage == Usage(7, len(delta.tokens) // 4 if stop else 4, 1)
    assert finished == []  # the engine has ended it by itself


class EndsBadly(FakeEngine):
    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        yield Output(request.request_id, pack([5]), num_output_tokens=1)
        if self.ready:
            yield Output(request.request_id, b"", finish=Finish.CANCELLED)


@pytest.mark.parametrize("says_cancelled", [True, False])
def test_an_engine_that_just_ends_is_an_error(says_cancelled: bool) -> None:
    async def test() -> None:
        engine = EndsBadly(ModelInfo(MODEL, 512, 1))
        world = World(engine)
        call = await world.frontdoor.open(TENANT, spec())
        engine.ready = says_cancelled
        with pytest.raises(ApiError) as caught:
            async for _ in call.deltas():
                pass
        assert caught.value.code == ("cancelled" if says_cancelled else "internal")

    run(test)


# --- metrics ------------------------------------------------------------------------------------------------------


def test_every_end_is_counted_once() -> None:
    async def test() -> None:
        world = World()
        await world.deltas(spec(max_tokens=3))
        world.engine.script = lambda request: Script([5, 6], error=OutputError(OutputErrorCode.WORKER_LOST, "gone"))
        with pytest.raises(ApiError):
            await world.deltas(spec())
        world.engine.script = lambda request: Script([], refused=Refused(RefusedReason.QUEUE_FULL, "full", 5))
        with pytest.raises(ApiError):
            await world.deltas(spec())
        with pytest.raises(ApiError):
            await world.deltas(spec(temperature=9.0))
        world.engine.script = lambda request: Script([5], hangs=True)
        call = await world.frontdoor.open(TENANT, spec())
        async with aclosing(call.deltas()) as deltas:
            await anext(deltas)
        assert world.metric("vllm:request_success_total", finished_reason="length") == 1
        for code in ("worker_lost", "queue_full", "invalid", "cancelled"):
            assert world.metric("coppice_requests_failed_total", code=code) == 1, code
        assert world.metric("vllm:generation_tokens_total") == 3 + 2 + 1
        assert world.metric("vllm:time_to_first_token_seconds_count") == 3
        assert world.metric("vllm:e2e_request_latency_seconds_count") == 1
        assert world.metric("vllm:inter_token_latency_seconds_count") == 2 + 1
        assert world.engine.num_running == 0

    run(test)


def test_an_answer_that_comes_whole_has_its_latencies_from_the_engine() -> None:
    async def test() -> None:
        world = World()

        def whole(request: Request) -> Script:
            start = request.arrived_ns
            chunks = ((start, start + 1_000_000, 3), (start, start + 2_000_000, 1))
            return Script([5, 6, 7], chunks=chunks, stop_token=False)

        world.engine.script = whole
        await world.deltas(spec(streams=False))
        assert world.metric("vllm:time_to_first_token_seconds_count") == 1
        assert (world.metric("vllm:time_to_first_token_seconds_sum") or 1) <= 0.002
        assert world.metric("vllm:inter_token_latency_seconds_count") == 1
        world.engine.script = lambda request: Script([5, 6, 7])
        await world.deltas(spec(streams=False))
        assert world.metric("vllm:time_to_first_token_seconds_count") == 2
        assert world.metric("vllm:inter_token_latency_seconds_count") == 1

    run(test)


def test_forks_count_the_prompt_once() -> None:
    async def test() -> None:
        world = World()
        deltas = await world.deltas(spec("one two", n=3, max_tokens=2))
        num_prompt = len(world.ids("one two"))
        usages = [delta.ending.usage.prompt_tokens for delta in deltas if delta.ending is not None]
        assert sorted(usages) == [0, 0, num_prompt]
        assert world.metric("vllm:prompt_tokens_total") == num_prompt
        assert world.metric("vllm:generation_tokens_total") == 6

    run(test)


def test_tenant_labels_are_capped() -> None:
    labels = CappedLabels()
    named = [labels.label(f"t{number}") for number in range(MAX_TENANT_LABELS + 5)]
    assert named[:MAX_TENANT_LABELS] == [f"t{number}" for number in range(MAX_TENANT_LABELS)]
    assert set(named[MAX_TENANT_LABELS:]) == {OTHER}
    assert labels.label("t0") == "t0"


# --- spans --------------------------------------------------------------------------------------------------------


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing.trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def call_span(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = [span for span in exporter.get_finished_spans() if span.name != "tokenize"]
    return span


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("tells", [True, False], ids=["all of it told", "cached tokens hidden"])
def test_a_call_is_a_span_with_the_stages_of_its_life_below_it(spans: InMemorySpanExporter, tells: bool) -> None:
    async def test() -> None:
        world = World()
        start = time.monotonic_ns()
        stages = (
            Stage(StageKind.POOL_FULL, start, start + 1_000_000, "search", 412),
            Stage(StageKind.ASKED_BACK, start + 1_000_000, start + 1_000_000, "search", 100),
            Stage(StageKind.PREFILL, start + 1_000_000, start + 3_000_000),
        )
        world.engine.script = lambda request: Script(
            world.ids("ok"),
            num_cached_tokens=1,
            num_written_tokens=2,
            stages=stages,
            chunks=((start + 1_000_000, start + 2_000_000, 3),),
        )
        chat = GenerationSpec(MODEL, (ChatPrompt((ChatMessage("user", "secret words"),)),), max_tokens=9)
        before_ns = time.time_ns()
        ending = (await world.deltas(chat, shows_cached_tokens=tells))[-1].ending
        assert ending is not None
        assert (ending.usage.cached_tokens, ending.usage.written_tokens) == ((1, 2) if tells else (0, 0))
        found = by_name(spans)
        call = found[f"chat {MODEL}"]
        assert call.context is not None
        attributes = dict(call.attributes or {})
        assert attributes["gen_ai.operation.name"] == "chat"
        assert attributes["gen_ai.provider.name"] == "coppice"
        assert attributes["gen_ai.request.model"] == MODEL
        assert attributes["gen_ai.request.max_tokens"] == 9
        assert attributes["gen_ai.usage.output_tokens"] == len(world.ids("ok")) + 1
        assert attributes["gen_ai.usage.cache_read.input_tokens"] == 1
        assert attributes["gen_ai.usage.cache_creation.input_tokens"] == 2
        assert "gen_ai.request.choice.count" not in attributes
        assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
        assert attributes["coppice.tenant"] == "default"
        for name in ("pool_full", "prefill", "chunk"):
            assert found[name].parent is not None
            assert found[name].parent.span_id == call.context.span_id  # type: ignore[union-attr]
            assert abs((found[name].start_time or 0) - before_ns) < 60_000_000_000
        assert (found["prefill"].end_time or 0) - (found["prefill"].start_time or 0) == 2_000_000
        assert dict(found["pool_full"].attributes or {}) == {"coppice.blocker": "search", "coppice.amount": 412}
        (event,) = call.events
        assert (event.name, dict(event.attributes or {})["coppice.amount"]) == ("asked_back", 100)
        assert "secret" not in str([span.to_json() for span in spans.get_finished_spans()])

    run(test)


def test_times_of_a_wall_clock_are_taken_as_they_are(spans: InMemorySpanExporter) -> None:
    async def test() -> None:
        world = World()
        now = time.time_ns()
        world.engine.script = lambda request: Script([5], stages=(Stage(StageKind.DECODE, now, now + 5),))
        await world.deltas(spec())
        assert by_name(spans)["decode"].start_time == now

    run(test)


@pytest.mark.parametrize("kind", ["refused", "failed", "aborted", "closed", "invalid"])
def test_every_call_ends_its_span_and_says_how(spans: InMemorySpanExporter, kind: str) -> None:
    async def test() -> None:
        world = World()
        if kind == "refused":
            world.engine.script = lambda request: Script([], refused=Refused(RefusedReason.QUEUE_FULL, "x", 5))
        elif kind == "failed":
            world.engine.script = lambda request: Script([5], error=OutputError(OutputErrorCode.WORKER_LOST, "x"))
        else:
            world.engine.script = lambda request: Script([5], hangs=True)
        if kind == "closed":
            call = await world.frontdoor.open(TENANT, spec())
            async with aclosing(call.deltas()) as deltas:
                await anext(deltas)
        elif kind == "aborted":
            call = await world.frontdoor.open(TENANT, spec(), None, RequestId("x", "x-1"))
            async with aclosing(call.deltas()) as deltas:
                await anext(deltas)
                assert await world.frontdoor.abort(TENANT, "x") == 1
                with pytest.raises(ApiError):
                    await anext(deltas)
        else:
            prompt = TokenPrompt(pack([99999])) if kind == "invalid" else TextPrompt("x")
            with pytest.raises(ApiError):
                await world.deltas(GenerationSpec(MODEL, (prompt,)))
        span = call_span(spans)
        expected = {
            "refused": "queue_full",
            "failed": "worker_lost",
            "aborted": "request_aborted",
            "closed": "cancelled",
            "invalid": "invalid_token_id",
        }
        assert dict(span.attributes or {})["error.type"] == expected[kind]

    run(test)


def test_the_engine_runs_under_the_calls_span(spans: InMemorySpanExporter) -> None:
    async def test() -> None:
        world = World()
        seen: list[int] = []

        def script(request: Request) -> Script:
            seen.append(trace.get_current_span().get_span_context().span_id)
            return Script([5])

        world.engine.script = script
        await world.deltas(GenerationSpec(MODEL, (TextPrompt("a"), TextPrompt("b"))))
        span = call_span(spans)
        assert span.context is not None
        assert seen == [span.context.span_id] * 2
        assert span.name == f"text_completion {MODEL}"

    run(test)
