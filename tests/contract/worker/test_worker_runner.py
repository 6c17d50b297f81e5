"""The step thread's bookkeeping: observers forget what was dropped, questions that are late are not asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from coppice.ids import SchedulerEpoch, WorkerEpoch
from coppice.messages.registration import Fence
from coppice.messages.step import StepPlan
from coppice_worker.core.worker import WorkerCore
from coppice_worker.edge.metrics import WorkerMetrics
from coppice_worker.edge.runner import StepRunner
from coppice_worker.edge.tracing import Observers, WorkerSpans
from tests.contract.worker.test_worker_service import handle, start, u32
from tests.contract.worker.test_worker_watchdog import Hanging
from tests.fakes.waiting import WAIT_S, wait_for


def take_over(core: WorkerCore) -> object:
    return core.attach_scheduler(SchedulerEpoch(2))


def fence(core: WorkerCore) -> object:
    return core.fence(Fence(1, WorkerEpoch(1), scheduler_epochs=(SchedulerEpoch(1),)))


TRACEPARENT = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


def test_a_burst_is_one_plan_of_many_tokens() -> None:
    """The first token comes with the prompt; then one plan of 1 and one of 4 decode steps."""
    registry, exporter = CollectorRegistry(), InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    device = Hanging()
    observers = Observers(WorkerMetrics(registry, "w"), WorkerSpans(provider.get_tracer("test")))
    runner = StepRunner(device.core, device.executor, observers, device.results.append)
    runner.start()
    device.executor.let_go.set()
    begun = replace(start(1, 2, handle(3) + handle(4)), traceparent=TRACEPARENT)
    for plan in (
        StepPlan(1, attach=(begun,), rows=u32(1), row_tokens=u32(2)),
        StepPlan(2, repeat_rows=True),
        StepPlan(3, rows=u32(1), row_tokens=u32(1), num_decode_steps=4),
        StepPlan(4, detach=u32(1)),
    ):
        runner.step(SchedulerEpoch(1), plan, lambda: True, device.results.append, device.results.append)
    wait_for(lambda: len(device.results) == 4, "the steps")
    runner.stop()
    assert device.results[2].sampled_tokens == u32(1004, 1005, 1006, 1007)
    assert registry.get_sample_value("coppice_worker_steps_total") == 4
    assert registry.get_sample_value("coppice_worker_tokens_computed_total") == 7
    assert registry.get_sample_value("coppice_worker_tokens_sampled_total") == 6
    spans = {span.name: span for span in exporter.get_finished_spans()}
    tokens = {name: (span.attributes or {})["coppice.tokens"] for name, span in spans.items()}
    assert tokens == {"worker.prefill_chunk": 2, "worker.step": 2, "worker.decode": 5}
    (link,) = spans["worker.step"].links
    assert format(link.context.trace_id, "032x") == "1" * 32, "the step is linked to the request that is in it"
    assert spans["worker.step"].parent is None
    device.close()


@pytest.mark.parametrize("drop", [take_over, fence])
def test_observers_forget_what_a_scheduler_left_behind(drop: Callable[[WorkerCore], object]) -> None:
    registry = CollectorRegistry()
    spans = WorkerSpans(TracerProvider().get_tracer("test"))
    device = Hanging()
    runner = StepRunner(
        device.core, device.executor, Observers(WorkerMetrics(registry, "w"), spans), device.results.append
    )
    runner.start()
    device.executor.let_go.set()
    begun = replace(start(1, 2, handle(3)), traceparent=TRACEPARENT)
    plan = StepPlan(1, attach=(begun,), rows=u32(1), row_tokens=u32(2))
    runner.step(SchedulerEpoch(1), plan, lambda: True, device.results.append, device.results.append)
    wait_for(lambda: device.results, "the step")
    assert registry.get_sample_value("coppice_worker_sequences") == 1
    assert spans._traced
    runner.ask(drop, WAIT_S)
    runner.ask(lambda core: None, WAIT_S)  # behind whatever the drop led to
    assert registry.get_sample_value("coppice_worker_sequences") == 0
    assert not spans._traced
    runner.stop()
    device.close()


def test_a_question_that_came_too_late_is_not_asked() -> None:
    device = Hanging()
    device.step()
    asked: list[str] = []
    with pytest.raises(TimeoutError):
        device.runner.ask(lambda core: asked.append("late"), 0.01)
    device.executor.let_go.set()
    device.runner.ask(lambda core: asked.append("in time"), WAIT_S)
    assert asked == ["in time"]
    device.close()
