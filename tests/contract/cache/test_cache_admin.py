"""Admin REST of the cache service: health, metrics, statistics, trees, audits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from fastapi.testclient import TestClient
from msgspec.structs import replace
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from coppice.telemetry.traces import Tracing, configure_tracing
from coppice_cache.core.base.results import DomainStats, IndexStats, WorkerStats
from coppice_cache.edge import process
from coppice_cache.edge.api.admin_http import build_app
from coppice_cache.edge.api.body_limit import BODY_BYTES_MAX
from coppice_cache.edge.metrics import DOMAINS_MAX, OTHER, CacheMetrics
from tests.fakes.cache.cache_ends import Cache, FakeWorker, StreamClient, UnaryClient, lease, prompt
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def cache(keep: Keep) -> Cache:
    started = keep(Cache())
    assert isinstance(started, Cache)
    return started


@pytest.fixture
def client(cache: Cache, keep: Keep) -> UnaryClient:
    """One tree of two paths in domain tenant/a, a lease in tenant/b."""
    keep(FakeWorker(cache)).wait_registered()
    opened = keep(UnaryClient(cache))
    assert isinstance(opened, UnaryClient)
    for number, text in enumerate((prompt(9), prompt(4) + prompt(5, first=90))):
        opened.acquire(number, text, "tenant/a")
        opened.publish(number, text[: 8 * 4])
        opened.release(number)
    opened.acquire(7, prompt(9), "tenant/a")
    opened.acquire(8, prompt(9), "tenant/b")
    return opened


def metric(cache: Cache, name: str, **labels: str) -> float:
    status, text = cache.rest("/metrics")
    assert status == 200
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    assert len(found) == 1, (name, labels, found)
    return float(found[0])


def test_health(cache: Cache) -> None:
    assert cache.rest("/healthz") == (200, "ok\n")
    assert cache.rest("/readyz") == (200, {"status": "ready", "reasons": []})


def test_readiness_ends_before_the_service_does(cache: Cache) -> None:
    cache.process._readiness.is_serving = False
    assert cache.rest("/readyz")[0] == 503
    assert cache.rest("/healthz")[0] == 200


def test_a_body_is_refused_before_it_is_parsed(cache: Cache) -> None:
    process = cache.process
    app = build_app(process._service, CollectorRegistry(), process._readiness)
    headers = {"Content-Type": "application/json"}
    with closing(TestClient(app, base_url="http://localhost")) as client:
        said = client.post("/v1/explain", content=b" " * (BODY_BYTES_MAX + 1), headers=headers)
        assert said.status_code == 413
        assert "more than 16777216 bytes" in said.json()["error"]["message"]
        assert client.post("/v1/explain", content=b" " * BODY_BYTES_MAX, headers=headers).status_code == 400


def test_stats_name_every_block(cache: Cache, client: UnaryClient) -> None:
    stats = cache.stats()
    (worker,) = stats["workers"]
    assert worker["free_blocks"] + worker["leased_blocks"] + worker["cached_blocks"] == worker["num_blocks"] == 16
    assert (stats["sessions"], stats["leases"], stats["cached_blocks"], stats["leased_blocks"]) == (1, 2, 3, 4)
    assert {domain["domain"] for domain in worker["domains"]} >= {"tenant/a", "tenant/b"}


def test_metrics_follow_the_core(cache: Cache, client: UnaryClient) -> None:
    assert metric(cache, "coppice_cache_blocks", worker="w", state="free") == 9
    assert metric(cache, "coppice_cache_blocks", worker="w", state="cached") == 3
    assert metric(cache, "coppice_cache_domain_blocks", worker="w", domain="tenant/b", state="leased") == 3
    assert metric(cache, "coppice_cache_leases", worker="w") == 2
    assert metric(cache, "coppice_cache_sessions") == 1
    assert metric(cache, "coppice_cache_epoch") == 1
    assert metric(cache, "coppice_cache_worker_open", worker="w") == 1
    assert metric(cache, "coppice_cache_fences_pending", worker="w") == 0
    assert metric(cache, "coppice_cache_prefix_query_tokens_total", domain="tenant/a") == 27
    assert metric(cache, "coppice_cache_prefix_hit_tokens_total", domain="tenant/a") == 12
    assert metric(cache, "coppice_cache_evicted_blocks_total", domain="tenant/a") == 0
    assert metric(cache, "coppice_cache_degraded") == 0


def test_a_pending_fence_shows(cache: Cache, keep: Keep) -> None:
    worker = keep(FakeWorker(cache, acknowledges=False)).wait_registered()
    client = keep(UnaryClient(cache))
    client.acquire(1, prompt(9))
    client.release(1, through_fence=True)
    fence = worker.wait_fence()
    assert metric(cache, "coppice_cache_fences_pending", worker="w") == 1
    assert metric(cache, "coppice_cache_blocks", worker="w", state="draining") == 3
    worker.acknowledge(fence)
    wait_for(lambda: metric(cache, "coppice_cache_fences_pending", worker="w") == 0, "the fence ends")


def test_a_tree_is_shown(cache: Cache, client: UnaryClient) -> None:
    status, dump = cache.rest("/v1/domains/tenant/a/tree")
    assert status == 200
    assert (dump["domain"], dump["truncated"]) == ("tenant/a", False)
    (tree,) = dump["trees"]
    assert (tree["worker_id"], bytes.fromhex(tree["namespace"])) == ("w", b"model-a")
    assert [(node["depth"], node["num_blocks"]) for node in tree["nodes"]] == [(0, 0), (1, 1), (2, 1), (2, 1)]
    assert sum(node["num_pins"] for node in tree["nodes"]) == 1


def test_a_tree_is_cut_where_asked(cache: Cache, client: UnaryClient) -> None:
    shallow = cache.rest("/v1/domains/tenant/a/tree?max_depth=1")[1]
    assert shallow["truncated"]
    assert len(shallow["trees"][0]["nodes"]) == 2
    few = cache.rest("/v1/domains/tenant/a/tree?limit=3")[1]
    assert few["truncated"]
    assert len(few["trees"][0]["nodes"]) == 3


def test_an_unknown_domain_is_404(cache: Cache, client: UnaryClient) -> None:
    status, body = cache.rest("/v1/domains/tenant/zz/tree")
    assert status == 404
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["code"] == "domain_not_found"
    assert "tenant/zz" in body["error"]["message"]


@pytest.mark.parametrize("query", ["max_depth=-1", "max_depth=x", "limit=0", "limit=1000000"])
def test_wrong_parameters_are_400_by_name(cache: Cache, query: str) -> None:
    status, body = cache.rest(f"/v1/domains/tenant/default/tree?{query}")
    assert status == 400
    assert query.split("=")[0] in body["error"]["message"]


def test_other_paths_and_methods_have_the_same_shape(cache: Cache) -> None:
    assert cache.rest("/v2/nothing")[0] == 404
    status, body = cache.rest("/v1/explain")
    assert status == 405
    assert "GET /v1/explain" in body["error"]["message"]


def test_an_audit_finds_a_broken_invariant(cache: Cache, client: UnaryClient) -> None:
    cache.audit()
    worker = cache.process._service._locked.core.state.workers["w"]  # type: ignore[index]
    worker.ledger.counts[0] += 1
    status, body = cache.rest("/v1/audit", "POST")
    assert (status, body["holds"], body["invariant"]) == (500, False, "I1")


def test_a_broken_core_ends_the_process(cache: Cache, client: UnaryClient) -> None:
    def fail(now_ns: int) -> None:
        raise ZeroDivisionError("a bug")

    cache.process._service._locked.core.tick = fail  # type: ignore[method-assign]
    assert cache.broken.wait(60)
    assert isinstance(cache.process.failures[0], ZeroDivisionError)
    assert cache.rest("/v1/stats")[0] == 500
    cache.process.failures.clear()
    cache.process._service.close()
    assert gc.isenabled(), "the cyclic collector is given back although the ticker had ended"


# ---- metrics of many domains ----


def domain_stats(domain: str, hit_tokens: int) -> DomainStats:
    return DomainStats("w", domain, 1, 2, 3, 0, 0, 9, 1, hit_tokens, 100, 0)  # type: ignore[arg-type]


def index_stats(epoch: int, *domains: DomainStats) -> IndexStats:
    worker = WorkerStats("w", epoch, True, 9, 9, 0, 0, 0, 0, 0, 0, 0, domains)  # type: ignore[arg-type]
    return IndexStats(1, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, (worker,))  # type: ignore[arg-type]


def test_domains_beyond_the_cap_are_summed() -> None:
    stats = index_stats(1, *[domain_stats(f"d{number:03}", 10) for number in range(DOMAINS_MAX + 8)])
    metrics = CacheMetrics(lambda: stats, lambda: False, lambda: 0)
    families = {family.name: family for family in metrics.collect()}
    hits = {sample.labels["domain"]: sample.value for sample in families["coppice_cache_prefix_hit_tokens"].samples}
    assert len(hits) == DOMAINS_MAX + 1
    assert hits["d000"] == 10
    assert hits[OTHER] == 80
    blocks = families["coppice_cache_domain_blocks"].samples
    assert [s.value for s in blocks if s.labels["domain"] == OTHER and s.labels["state"] == "draining"] == [24]
    assert len(blocks) == 3 * (DOMAINS_MAX + 1)


def test_counters_never_fall_when_a_worker_epoch_dies() -> None:
    current = [index_stats(1, domain_stats("d", 40))]
    metrics = CacheMetrics(lambda: current[0], lambda: False, lambda: 0)

    def hits() -> float:
        family = next(f for f in metrics.collect() if f.name == "coppice_cache_prefix_hit_tokens")
        return float(family.samples[0].value)

    assert hits() == hits() == 40
    current[0] = index_stats(2, domain_stats("d", 7))
    assert hits() == 47
    current[0] = index_stats(2, domain_stats("d", 9))
    assert hits() == 49


# ---- tracing ----


class Spans(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[Any] = []

    def export(self, spans: Any) -> SpanExportResult:
        self.spans.extend(spans)
        return SpanExportResult.SUCCESS


def test_an_acquire_is_a_span_of_its_request(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Spans()

    def traced(service_name: str, endpoint: str | None, **others: Any) -> Tracing:
        return configure_tracing(service_name, endpoint, exporter=exporter, **others)

    monkeypatch.setattr(process, "configure_tracing", traced)
    cache = keep(Cache())
    keep(FakeWorker(cache)).wait_registered()
    unary, stream = keep(UnaryClient(cache)), keep(StreamClient(cache))
    unary.acquire(1, prompt(9), traceparent=TRACEPARENT)
    unary.publish(1, prompt(8))
    stream.ask(
        stream.acquire(4, prompt(9)),  # of a request that nobody traces
        replace(stream.acquire(2, prompt(9)), traceparent=TRACEPARENT),
        replace(stream.acquire(3, prompt(400)), traceparent=TRACEPARENT),
    )
    cache.process._tracing._processor.force_flush()  # type: ignore[union-attr]
    wait_for(lambda: len(exporter.spans) == 3, "three spans")
    cold, warm, refused = exporter.spans
    assert cold.name == "cache.acquire"
    assert f"{cold.context.trace_id:032x}" == TRACEPARENT.split("-")[1]
    assert f"{cold.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
    assert cold.attributes["coppice.lease"] == lease(1).hex()
    assert dict(warm.attributes) == {
        "coppice.domain": "a",
        "coppice.lease": lease(2).hex(),
        "coppice.tokens": 9,
        "coppice.answer": "Grant",
        "coppice.worker": "w",
        "coppice.cached_tokens": 8,
    }
    assert refused.attributes["coppice.answer"] == "NoCapacity"
    assert refused.attributes["coppice.reason"] == "never_fits"
    assert warm.end_time >= warm.start_time
