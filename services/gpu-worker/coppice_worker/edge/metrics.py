"""Metrics of a worker, as an observer of its steps. docs/METRICS.md lists them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coppice.ids import TOKEN_BYTES
from coppice.messages.registration import Direction
from coppice.messages.step import RefusalCode, StepPlan, StepResult
from coppice_worker.edge.runner import StepObserver

_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class WorkerMetrics(StepObserver):
    """Counts steps and what they computed."""

    def __init__(self, registry: CollectorRegistry, worker_id: str) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        info = Gauge(
            "coppice_worker_info",
            "1; its name, to join its other metrics with by instance.",
            ["worker"],
            registry=registry,
        )
        info.labels(worker_id).set(1)
        self._steps = counter("coppice_worker_steps", "Plans computed, whatever their number of decode steps.")
        self._computed = counter(
            "coppice_worker_tokens_computed", "Tokens whose KV was computed; one that was cached never counts."
        )
        self._sampled = counter("coppice_worker_tokens_sampled", "Tokens sampled.")
        refusals = counter("coppice_worker_refusals", "Sequences that it refused to compute, by reason.", "code")
        self._refusals = {code: refusals.labels(code.value) for code in RefusalCode}
        self._seconds = Histogram(
            "coppice_worker_step_seconds", "Duration of a plan.", buckets=_STEP_BUCKETS, registry=registry
        )
        self._sequences = Gauge("coppice_worker_sequences", "Sequences that are attached.", registry=registry)
        self._live: set[int] = set()
        copied = (
            counter("coppice_worker_copied_blocks", "Blocks copied between tiers.", "direction"),
            counter("coppice_worker_copied_bytes", "Bytes copied between tiers.", "direction"),
            counter("coppice_worker_copy_seconds", "Time that copies between tiers took.", "direction"),
            counter("coppice_worker_copy_batches", "Batches of copies between tiers.", "direction"),
        )
        self._copied = {direction: [family.labels(direction.value) for family in copied] for direction in Direction}
        self._copies_refused = counter("coppice_worker_copies_refused", "Orders to copy that failed.")

    def planned(self, plan: StepPlan) -> None:
        self._live.difference_update(memoryview(plan.detach).cast("I") if plan.detach else ())
        self._live.update(start.sequence_id for start in plan.attach)
        self._sequences.set(len(self._live))

    def cleared(self) -> None:
        self._live.clear()
        self._sequences.set(0)

    def computed(self, plan: StepPlan, result: StepResult, started_ns: int, ended_ns: int) -> None:
        self._steps.inc()
        self._computed.inc(result.num_tokens)
        self._sampled.inc(len(result.sampled_tokens) // TOKEN_BYTES)
        self._seconds.observe(result.duration_us / 1e6)
        for refusal in result.refusals:
            self._refusals[refusal.code].inc()

    def copied(self, direction: Direction, num_blocks: int, num_bytes: int, duration_ns: int) -> None:
        amounts = (num_blocks, num_bytes, duration_ns / 1e9, 1)
        for counter, amount in zip(self._copied[direction], amounts, strict=True):
            counter.inc(amount)

    def copies_refused(self, count: int) -> None:
        self._copies_refused.inc(count)
