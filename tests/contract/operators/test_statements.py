"""Statements of a running cache service: over REST, as counters, on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coppice.ids import CacheEpoch, DomainId, WorkerEpoch, WorkerId
from coppice_cache.core.base.events import Tier
from coppice_cache.core.base.results import IndexStats
from coppice_cache.core.base.statements import DomainStatement, PoolStatement, PoolTime, Statement
from coppice_cache.edge.metrics import DOMAINS_MAX, OTHER, CacheMetrics
from tests.contract.cache.test_cache_inspection import coppice
from tests.fakes.cache.cache_ends import Cache, FakeWorker, UnaryClient, prompt
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
A, B = "tenant/a", "tenant/b"
NS_PER_S = 10**9


@pytest.fixture
def cache(keep: Keep) -> Cache:
    """16 blocks: 2 cached and 1 leased of tenant/a, 3 leased of tenant/b."""
    started = keep(Cache())
    keep(FakeWorker(started)).wait_registered()
    client = keep(UnaryClient(started))
    client.acquire(1, prompt(9), A)
    client.publish(1, prompt(8))
    client.acquire(2, prompt(9), B)
    assert isinstance(started, Cache)
    return started


def statement(cache: Cache, query: str = "") -> Any:
    status, found = cache.rest(f"/v1/statements{query}")
    assert status == 200, found
    return found


def excess(pool: Any) -> int:
    held = sum(domain["held_block_ns"] for domain in pool["domains"])
    return int(held + pool["free_block_ns"] + pool["unclaimed_block_ns"] - pool["pool_block_ns"])


def of(pool: Any, domain: str) -> Any:
    return next(one for one in pool["domains"] if one["domain"] == domain)


def test_the_parts_of_a_statement_are_the_pool(cache: Cache) -> None:
    before = statement(cache)
    wait_for(lambda: of(statement(cache)["totals"][0], A)["cached_block_ns"] > NS_PER_S // 50, "time passes")
    found = statement(cache)
    (pool,), (whole,) = found["pools"], found["totals"]
    assert (pool["worker_id"], pool["tier"], pool["num_blocks"], found["ended"]) == ("w", "device", 16, [])
    assert pool["pool_block_ns"] == 16 * pool["elapsed_ns"] == whole["pool_block_ns"]
    assert excess(pool) == excess(whole) == 0
    elapsed_ns = pool["elapsed_ns"] - before["pools"][0]["elapsed_ns"]
    more = {
        (domain, part): of(pool, domain)[f"{part}_block_ns"] - of(before["pools"][0], domain)[f"{part}_block_ns"]
        for domain in (A, B)
        for part in ("cached", "leased", "held", "borrowed")
    }
    blocks = {A: {"cached": 2, "leased": 1, "held": 3, "borrowed": 3}, B: {"leased": 3, "held": 3, "borrowed": 3}}
    assert more == {(domain, part): blocks[domain].get(part, 0) * elapsed_ns for domain, part in more}


def test_a_statement_of_one_worker(cache: Cache, keep: Keep) -> None:
    keep(FakeWorker(cache, "v", 8)).wait_registered()
    assert [pool["num_blocks"] for pool in statement(cache)["pools"]] == [16, 8]
    found = statement(cache, "?worker_id=v")
    assert [pool["num_blocks"] for pool in found["pools"]] == [8]
    assert found["totals"][0]["pool_block_ns"] == found["pools"][0]["pool_block_ns"]
    status, refused = cache.rest("/v1/statements?worker_id=x")
    assert (status, refused["error"]["code"]) == (404, "worker_not_found")


def test_a_worker_that_leaves_stays_in_the_totals(keep: Keep) -> None:
    cache = keep(Cache(worker_ttl_ms=1_000))
    client = keep(UnaryClient(cache))
    worker = FakeWorker(cache)
    worker.wait_registered()
    client.acquire(1, prompt(9), A)
    worker.stop()
    wait_for(lambda: not statement(cache)["pools"], "the worker is given up")
    found = statement(cache)
    (ended,) = found["ended"]
    assert found["totals"] == [ended]
    assert (ended["num_epochs"], excess(ended)) == (1, 0)
    assert 0 < of(ended, A)["leased_block_ns"] <= 3 * ended["pool_block_ns"] // 16
    assert statement(cache)["ended"] == [ended]


def test_counters_are_the_statement(cache: Cache) -> None:
    text = cache.rest("/metrics")[1]
    samples = {
        (sample.name.removeprefix("coppice_cache_"), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "block_seconds_total" in sample.name
    }
    pool = samples["pool_block_seconds_total", ("tier", "device")]
    parts = [value for key, value in samples.items() if str(key[0]).startswith(("held_", "unheld_"))]
    assert sum(parts) == pytest.approx(pool)
    held = samples["held_block_seconds_total", ("domain", B), ("state", "leased"), ("tier", "device")]
    assert held == samples["borrowed_block_seconds_total", ("domain", B), ("tier", "device")] > 0
    for name in ("guaranteed", "lent"):
        assert samples[f"{name}_block_seconds_total", ("domain", A), ("tier", "device")] == 0


def statement_of(cache_epoch: int, *domains: DomainStatement) -> Statement:
    time = PoolTime(100 * NS_PER_S, 60 * NS_PER_S)
    pool = PoolStatement(Tier.DEVICE, time, domains, 1, WorkerId("w"), WorkerEpoch(1), 10, 10 * NS_PER_S)
    return Statement(CacheEpoch(cache_epoch), 10 * NS_PER_S, (pool,), ())


def values(metrics: CacheMetrics, name: str) -> dict[str, float]:
    """By domain, or by state where there is no domain."""
    family = next(found for found in metrics.collect() if found.name == f"coppice_cache_{name}")
    return {sample.labels.get("domain", sample.labels.get("state", "")): sample.value for sample in family.samples}


def metrics_of(current: list[Statement]) -> CacheMetrics:
    stats = IndexStats(CacheEpoch(1), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ())
    return CacheMetrics(lambda: stats, lambda: False, lambda: 0, statement=lambda: current[0])


def test_domains_beyond_the_cap_are_one_counter() -> None:
    many = [
        DomainStatement(DomainId(f"d{number:03}"), lent_block_ns=NS_PER_S, displaced_blocks=2)
        for number in range(DOMAINS_MAX + 8)
    ]
    metrics = metrics_of([statement_of(1, *many, DomainStatement(DomainId(""), lent_block_ns=NS_PER_S))])
    for name, each in (("lent_block_seconds", 1), ("displaced_blocks", 2)):
        found = values(metrics, name)
        assert len(found) == DOMAINS_MAX + 1
        assert (found["d000"], found[OTHER]) == (each, 8 * each + (1 if each == 1 else 0))


def test_counters_go_on_when_the_service_starts_over() -> None:
    """A peer knew a later epoch: another core, with statements of its own."""
    d = DomainId("d")
    current = [statement_of(1, DomainStatement(d, guaranteed_block_ns=4 * NS_PER_S))]
    metrics = metrics_of(current)
    assert values(metrics, "guaranteed_block_seconds") == {"d": 4}
    current[0] = statement_of(5, DomainStatement(d, guaranteed_block_ns=NS_PER_S))
    assert values(metrics, "guaranteed_block_seconds") == {"d": 5}
    assert values(metrics, "guaranteed_block_seconds") == {"d": 5}
    assert values(metrics, "unheld_block_seconds") == {"free": 120, "unclaimed": 0}


def test_the_command(cache: Cache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COPPICE_ADMIN_URL", f"http://127.0.0.1:{cache.http_port}")
    wait_for(lambda: statement(cache)["elapsed_ns"] > NS_PER_S // 5, "time passes")
    assert coppice("statement") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1st start of the cache, for ")
    assert lines[0].endswith(" s, in block-seconds")
    assert lines[2] == "device blocks of 1 worker epoch"
    header, *rows = lines[3:]
    assert header.split()[:6] == ["domain", "of", "the", "pool", "held", "leased"]
    assert sorted(row.split()[0] for row in rows) == ["(all)", "(free)", A, B, "tenant/default"]
    assert rows[-1].split()[:2] == ["(all)", "100.0%"]
    assert coppice("statement", "--worker", "w", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [excess(pool) for pool in found["totals"]] == [0]
    assert coppice("statement", "--worker", "x") == 2
    assert "no worker 'x' is registered" in capsys.readouterr().err
