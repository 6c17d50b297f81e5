"""Metrics of a worker, as an observer of its steps.

coppice_worker_steps_total              plans computed, whatever their number of decode steps
coppice_worker_tokens_computed_total    tokens whose KV was computed (a cached token never counts)
coppice_worker_tokens_sampled_total     tokens sampled
coppice_worker_refusals_total{code}     sequences refused, by reason
coppice_worker_step_seconds             duration of a plan
coppice_worker_sequences                live sequences
coppice_worker_copied_blocks_total{direction}    blocks copied between device and host: demote or promote
coppice_worker_copied_bytes_total{direction}     their bytes
coppice_worker_copy_seconds_total{direction}     time that the copies took
coppice_worker_copy_batches_total{direction}     batches in which they were made
coppice_worker_copies_refused_total              orders to copy that failed
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coppice.ids import TOKEN_BYTES
from coppice.messages.registration import Direction
from coppice.messages.step import StepPlan, StepResult
from coppice_worker.edge.runner import StepObserver

_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class WorkerMetrics(StepObserver):
    """Counts steps and what they computed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._steps = Counter("coppice_worker_steps", "Plans computed.", registry=registry)
        self._computed = Counter("coppice_worker_tokens_computed", "Tokens whose KV was computed.", registry=registry)
        self._sampled = Counter("coppice_worker_tokens_sampled", "Tokens sampled.", registry=registry)
        self._refusals = Counter("coppice_worker_refusals", "Sequences refused.", ["code"], registry=registry)
        self._seconds = Histogram(
            "coppice_worker_step_seconds", "Duration of a plan.", buckets=_STEP_BUCKETS, registry=registry
        )
        self._sequences = Gauge("coppice_worker_sequences", "Live sequences.", registry=registry)
        self._live: set[int] = set()
        names = ("copied_blocks", "copied_bytes", "copy_seconds", "copy_batches")
        self._copied = [
            Counter(
                f"coppice_worker_{name}", f"{name.replace('_', ' ')}, between tiers.", ["direction"], registry=registry
            )
            for name in names
        ]
        self._copies_refused = Counter(
            "coppice_worker_copies_refused", "Orders to copy that failed.", registry=registry
        )

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
            self._refusals.labels(refusal.code.value).inc()

    def copied(self, direction: Direction, num_blocks: int, num_bytes: int, duration_ns: int) -> None:
        for counter, amount in zip(self._copied, (num_blocks, num_bytes, duration_ns / 1e9, 1), strict=True):
            counter.labels(direction.value).inc(amount)

    def copies_refused(self, count: int) -> None:
        self._copies_refused.inc(count)
