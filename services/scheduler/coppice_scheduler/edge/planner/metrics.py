"""The planners' gauges and totals at scrape time, under the names that dashboards and gateways for vLLM read.

docs/METRICS.md lists them. Gateways that follow the model server protocol of the Gateway API inference extension read
vllm:num_requests_waiting, vllm:num_requests_running, vllm:kv_cache_usage_perc and vllm:cache_config_info.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from coppice_scheduler.core.state.request import SchedulerStats
from coppice_scheduler.edge.base.metrics import CappedLabels

_MS_PER_S = 1000


class PlannerCollector(Collector):
    """Asks for the newest stats when it is scraped; nothing is counted in its turns for it."""

    def __init__(self, stats: Callable[[], SchedulerStats], model: str) -> None:
        self._stats = stats
        self._model = model
        self._labels = CappedLabels()
        self._seen: set[str] = set()  # labels, which stay at 0 when nothing of theirs is at work

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        queried = stats.total_prefill_tokens + stats.total_cached_tokens
        yield self._gauge("vllm:num_requests_running", "Requests that hold memory.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", stats.waiting)
        yield from self._pool(stats)
        oldest = "How long the request that has waited longest waits."
        yield self._gauge("coppice_scheduler_oldest_wait_seconds", oldest, stats.oldest_wait_ms / _MS_PER_S)
        sleeping = "Of those waiting: another request computes their prefix."
        yield self._gauge("coppice_scheduler_requests_sleeping", sleeping, stats.sleeping)
        waits = "Times that a request waited for another's prefill."
        yield self._counter("coppice_scheduler_flight_waits", waits, stats.total_flight_waits)
        reclaims = "Times that the cache service asked for borrowed blocks."
        yield self._counter("coppice_scheduler_reclaims", reclaims, stats.total_reclaims)
        yield self._counter("vllm:num_preemptions", "Sequences that were preempted.", stats.total_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens that were looked up.", queried)
        yield self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens that were found cached.", stats.total_cached_tokens
        )
        yield self._gauge("coppice_scheduler_leases", "Leases that live.", stats.leases)
        yield self._gauge("coppice_scheduler_steps_in_flight", "Plans without a result.", stats.steps_in_flight)
        yield self._counter("coppice_scheduler_steps", "Results of plans taken.", stats.total_steps)
        yield self._tenants(stats)

    def _pool(self, stats: SchedulerStats) -> Iterable[Metric]:
        pool = stats.pool
        used = (
            "Share of its workers' KV blocks that requests at work hold, 1 = all; what is only cached counts as free."
        )
        share = pool.num_used_blocks / pool.num_blocks if pool.num_blocks else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", used, share)
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "1; the tokens of a block and the blocks of its workers together are labels.",
            labels=["model_name", "block_size", "num_gpu_blocks"],
        )
        config.add_metric([self._model, str(pool.block_size), str(pool.num_blocks)], 1)
        yield config

    def _tenants(self, stats: SchedulerStats) -> Metric:
        family = GaugeMetricFamily(
            "coppice_scheduler_tenant_requests",
            "Requests by tenant that are running or waiting.",
            labels=["model_name", "tenant", "state"],
        )
        counts: Counter[tuple[str, str]] = Counter()
        for tenant, of_tenant in stats.tenants.items():
            label = self._labels.label(tenant)
            counts[label, "running"] += of_tenant.running
            counts[label, "waiting"] += of_tenant.waiting
        self._seen |= {label for label, _ in counts}
        for label in sorted(self._seen):
            for state in ("running", "waiting"):
                family.add_metric([self._model, label, state], counts[label, state])
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: int) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
