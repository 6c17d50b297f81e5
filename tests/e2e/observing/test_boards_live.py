"""Every panel of every board has data while the stack is under load, and an alert rings when a worker is killed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from coppice_cli.tenants.operations import add_tenant
from tests.e2e.observing.prometheus import Prometheus, is_installed, scraping
from tests.e2e.stack import Stack
from tests.fakes.ports import free_port, valkey_server
from tests.fakes.telemetry.collector import Collector
from tests.fakes.waiting import wait_for
from tests.unit.repository.observing.queries import panels, targets

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not is_installed(), reason="prometheus is not installed here"),
    pytest.mark.timeout(900),
]

INTERVAL = "15s"  # what Grafana makes of $__rate_interval here
TENANTS = ("acme", "zeta", "canary-a", "canary-b")
BODY = {"model": "tiny", "temperature": 0, "ignore_eos": True}


class Load:
    """Calls of two tenants that share beginnings, and some that are refused, until it is closed."""

    def __init__(self, stack: Stack, keys: dict[str, str]) -> None:
        self._stack, self._keys = stack, keys
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(name,)) for name in ("acme", "zeta")]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, tenant: str) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            prompt = [(7 * number // 4 + at) % 250 for at in range(80)]
            key = self._keys[tenant]
            self._stack.post("/v1/completions", {**BODY, "prompt": prompt, "max_tokens": 6}, key)
            self._stack.post("/v1/completions", {**BODY, "prompt": prompt, "best_friend": 1}, key)
            self._stack.post("/v1/completions", {**BODY, "prompt": prompt}, "a-wrong-key")


@pytest.fixture(scope="module")
def keys() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def stack(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str], collector: Collector
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    path = folder / "tenants.yaml"
    keys.update({name: add_tenant(path, name, {"max_share": 0.5}, "main") for name in TENANTS})
    with valkey_server() as valkey:
        of_cache = [f"--redis-url=redis://127.0.0.1:{valkey.port}/0", "--worker-ttl-ms=2000"]
        of_worker = ["--host-memory-mib=16"]
        with Stack(
            checkpoint,
            folder / "logs",
            num_workers=2,
            tenants=path,
            cache_args=of_cache,
            worker_args=of_worker,
            scheduler_args=[f"--otlp-endpoint={collector.endpoint}"],
        ) as stack:
            yield stack


@pytest.fixture(scope="module")
def canary_port(stack: Stack, keys: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of an audit that has not ended: its metrics are there from the start."""
    port, log = free_port(), tmp_path_factory.mktemp("canary") / "log"
    environment = {
        **os.environ,
        "COPPICE_AUDIT_ISOLATION_VICTIM_KEY": keys["canary-a"],
        "COPPICE_AUDIT_ISOLATION_ATTACKER_KEY": keys["canary-b"],
    }
    command = [sys.executable, "-m", "coppice_cli", "audit", "isolation", "--base-url", stack.url, "--watch", "3600"]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--metrics-port", str(port)], env=environment, stdout=file, stderr=file)
    try:
        wait_for(lambda: stack.get(f"http://127.0.0.1:{port}/healthz")[0] == 200, "the canary's metrics")
        yield port
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def prometheus(
    stack: Stack, keys: dict[str, str], canary_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    jobs = {
        "cache": [stack.cache_http],
        "scheduler": [stack.metrics_port],
        "worker": stack.worker_http,
        "canary": [canary_port],
    }
    with ExitStack() as opened:
        load = Load(stack, keys)
        opened.callback(load.close)
        yield opened.enter_context(scraping(tmp_path_factory.mktemp("prometheus") / "p", jobs))


def asked(query: str, *, tenant: str = ".*", worker: str = ".*") -> str:
    values = {"$__rate_interval": INTERVAL, "$tenant": tenant, "$worker": worker}
    for name, value in values.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


def has_numbers(prometheus: Prometheus, query: str) -> bool:
    return any(not math.isnan(float(series["value"][1])) for series in prometheus.query(query))


@pytest.mark.parametrize(("tenant", "worker"), [(".*", ".*"), ("acme", "worker-1"), ("acme|zeta", "worker-0|worker-1")])
def test_every_panel_has_data(prometheus: Prometheus, tenant: str, worker: str) -> None:
    queries = [(board, panel, asked(query, tenant=tenant, worker=worker)) for board, panel, query in targets()]
    assert len(queries) > 60

    def empty() -> list[tuple[str, str, str]]:
        return [row for row in queries if not has_numbers(prometheus, row[2])]

    with suppress(AssertionError):  # what is missing says more than that something is
        wait_for(lambda: not empty(), "data", timeout_s=90)
    assert not empty()
    assert prometheus.unhealthy() == []


def test_variables_have_values(prometheus: Prometheus) -> None:
    def tenants() -> set[str]:
        return set(prometheus.label_values("tenant", "vllm:generation_tokens_total"))

    wait_for(lambda: {"acme", "zeta"} <= tenants(), "both tenants", 60)
    assert prometheus.label_values("worker", "coppice_cache_worker_open") == ["worker-0", "worker-1"]


def values(prometheus: Prometheus, query: str, *labels: str) -> dict[tuple[str, ...], float]:
    """By the values of these labels."""
    found = prometheus.query(query)
    return {tuple(series["metric"][label] for label in labels): float(series["value"][1]) for series in found}


def test_what_is_told_is_what_was_done(prometheus: Prometheus) -> None:
    """Refusals at the door are there, time goes somewhere, and answers are counted alike by all that counts them."""
    refused = {("(none)", "invalid_api_key"), ("acme", "unknown_parameter"), ("zeta", "unknown_parameter")}

    def told(query: str, *labels: str) -> set[tuple[str, ...]]:
        return set(values(prometheus, query, *labels))

    wait_for(lambda: refused <= told("coppice_calls_failed_total > 0", "tenant", "code"), "refusals", 60)
    wait_for(lambda: {("prefill",), ("decode",)} <= told("coppice_request_time_seconds_total > 0", "cause"), "time", 60)
    wait_for(lambda: bool(prometheus.query("max_over_time(vllm:kv_cache_usage_perc[1m]) > 0")), "a pool in use", 60)
    assert values(prometheus, "max_over_time(vllm:kv_cache_usage_perc[1m])")[()] < 1
    assert told("coppice_build_info", "service") == {("scheduler",), ("cache",), ("worker",), ("canary",)}
    queued, whole = "vllm:request_queue_time_seconds_count", "vllm:e2e_request_latency_seconds_count"
    wait_for(lambda: values(prometheus, f"sum({queued}) / sum({whole})") == {(): 1.0}, "equal counts", 60)


def test_a_dot_on_a_latency_leads_to_its_trace(stack: Stack, prometheus: Prometheus, collector: Collector) -> None:
    """As Grafana asks for the dots of each panel that has some."""
    expressions = {
        asked(target["expr"]) for panel in panels() for target in panel.get("targets", ()) if target.get("exemplar")
    }
    assert len(expressions) >= 3

    def named() -> set[tuple[str, str]]:
        found = [prometheus.exemplars(expression) for expression in expressions]
        return {(labels["tenant"], trace) for rows in found for labels, trace in rows} if all(found) else set()

    def are_there() -> bool:
        sent = {(span.attributes["coppice.tenant"], span.trace_id) for span in collector.spans if not span.parent_id}
        return {"acme", "zeta"} <= {tenant for tenant, _ in named()} and named() <= sent

    wait_for(are_there, "exemplars whose traces have arrived", 60)


def test_a_killed_worker_rings_and_nothing_else_does(stack: Stack, prometheus: Prometheus) -> None:
    quiet = {"NoIsolationAudit", "CanaryNotServed"}  # of an audit that has not ended, or found the machine too busy
    assert not [labels for labels in prometheus.firing() if labels["alertname"] not in quiet]
    stack.services["worker-1"].kill()

    def rings() -> bool:
        return {"WorkerLost", "TargetDown"} <= {labels["alertname"] for labels in prometheus.firing()}

    wait_for(rings, "the alarms of a lost worker", timeout_s=240)
    (lost,) = [labels for labels in prometheus.firing() if labels["alertname"] == "WorkerLost"]
    assert lost["worker"] == "worker-1"
    stack.services["worker-1"].start()
    wait_for(lambda: not rings(), "silence", timeout_s=240)
