"""The planner's gauges and totals at scrape time, under the names that dashboards for vLLM read.

vllm:num_requests_running, vllm:num_requests_waiting, vllm:num_preemptions_total
vllm:prefix_cache_queries_total, vllm:prefix_cache_hits_total     in tokens
coppice_scheduler_tenant_requests{tenant,state}                   running and waiting, first 32 tenants, then other
coppice_scheduler_leases, coppice_scheduler_steps_in_flight, coppice_scheduler_steps_total
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from coppice_scheduler.core.state.request import SchedulerStats
from coppice_scheduler.edge.base.metrics import TenantLabels


class PlannerCollector(Collector):
    """Asks for the newest stats when it is scraped; nothing is counted in its turns for it."""

    def __init__(self, stats: Callable[[], SchedulerStats], model: str) -> None:
        self._stats = stats
        self._model = model
        self._labels = TenantLabels()

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        queried = stats.total_prefill_tokens + stats.total_cached_tokens
        yield self._gauge("vllm:num_requests_running", "Requests that hold memory.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", stats.waiting)
        sleeping = "Of those waiting: another request computes their prefix."
        yield self._gauge("coppice_scheduler_requests_sleeping", sleeping, stats.sleeping)
        waits = "Times that a request waited for another's prefill."
        yield self._counter("coppice_scheduler_flight_waits", waits, stats.total_flight_waits)
        reclaims = "Times that the cache service asked for borrowed blocks."
        yield self._counter("coppice_scheduler_reclaims", reclaims, stats.total_reclaims)
        yield self._counter("vllm:num_preemptions", "Sequences that were preempted.", stats.total_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Tokens that were looked up.", queried)
        yield self._counter("vllm:prefix_cache_hits", "Tokens that were found.", stats.total_cached_tokens)
        yield self._gauge("coppice_scheduler_leases", "Leases that live.", stats.leases)
        yield self._gauge("coppice_scheduler_steps_in_flight", "Plans without a result.", stats.steps_in_flight)
        yield self._counter("coppice_scheduler_steps", "Results taken.", stats.total_steps)
        yield self._tenants(stats)

    def _tenants(self, stats: SchedulerStats) -> Metric:
        family = GaugeMetricFamily(
            "coppice_scheduler_tenant_requests", "Requests by tenant.", labels=["model_name", "tenant", "state"]
        )
        counts: Counter[tuple[str, str]] = Counter()
        for tenant, of_tenant in stats.tenants.items():
            label = self._labels.label(tenant)
            counts[label, "running"] += of_tenant.running
            counts[label, "waiting"] += of_tenant.waiting
        for (label, state), count in counts.items():
            family.add_metric([self._model, label, state], count)
        return family

    def _gauge(self, name: str, text: str, value: int) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: int) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
