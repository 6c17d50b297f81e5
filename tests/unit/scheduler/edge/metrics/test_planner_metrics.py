"""What gateways read of a scheduler's planners."""

from __future__ import annotations

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from coppice_scheduler.core.state.request import PoolUse, TenantStats
from coppice_scheduler.edge.base.engine import NO_STATS
from coppice_scheduler.edge.ipc.stats import of_all
from coppice_scheduler.edge.planner.metrics import PlannerCollector


def test_the_model_server_protocol() -> None:
    busy = replace(NO_STATS, running=3, waiting=2, oldest_wait_ms=1500, pool=PoolUse(100, 30, 16))
    registry = CollectorRegistry()
    registry.register(PlannerCollector(lambda: of_all([busy, replace(NO_STATS, pool=PoolUse(100, 10, 16))]), "demo"))
    of = {"model_name": "demo"}
    assert registry.get_sample_value("vllm:num_requests_running", of) == 3
    assert registry.get_sample_value("vllm:num_requests_waiting", of) == 2
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", of) == 0.2
    config = {**of, "block_size": "16", "num_gpu_blocks": "200"}
    assert registry.get_sample_value("vllm:cache_config_info", config) == 1
    assert registry.get_sample_value("coppice_scheduler_oldest_wait_seconds", of) == 1.5


def test_without_workers_nothing_is_used() -> None:
    registry = CollectorRegistry()
    registry.register(PlannerCollector(lambda: NO_STATS, "demo"))
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", {"model_name": "demo"}) == 0


def test_a_tenant_that_rests_is_still_there() -> None:
    stats = [replace(NO_STATS, tenants={"a": TenantStats(2, 1)}), replace(NO_STATS, tenants={"b": TenantStats(0, 3)})]
    registry = CollectorRegistry()
    registry.register(PlannerCollector(lambda: stats[0], "demo"))

    def told() -> dict[tuple[str, str], float]:
        family = next(one for one in registry.collect() if one.name == "coppice_scheduler_tenant_requests")
        return {(sample.labels["tenant"], sample.labels["state"]): sample.value for sample in family.samples}

    assert told() == {("a", "running"): 2, ("a", "waiting"): 1}
    stats.pop(0)
    assert told() == {("a", "running"): 0, ("a", "waiting"): 0, ("b", "running"): 0, ("b", "waiting"): 3}
