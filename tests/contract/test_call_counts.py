"""Whatever a client is told over REST and gRPC, it is counted: refusals at the door, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from coppice.request_log.stages import Stage, StageKind
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode
from coppice_scheduler.edge.frontend.door_limits import DoorLimits
from coppice_scheduler.edge.request_log.call_metrics import NO_TENANT
from tests.fakes.api.engine import Script
from tests.fakes.api.rest import MODEL, Served, read_until_closed, serving
from tests.fakes.waiting import wait_for

S = 1_000_000_000
KEY = {"Authorization": "Bearer key-a"}
COMPLETIONS, OTHER = "POST /v1/completions", "other"
TENANTS = TenantDirectory([Tenant(id="a", api_key_sha256=(digest_of_key("key-a"),), requests_per_minute=9)])


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(TENANTS, max_headers=30) as served:
        yield served


def values(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    """By the values of its labels, which are in order of their names; but for those that are 0."""
    samples = [sample for family in registry.collect() for sample in family.samples if sample.name == name]
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value for sample in samples if sample.value
    }


def test_each_refusal_at_the_door_is_counted(served: Served) -> None:
    def ask(body: Any, path: str = "/v1/completions", **headers: str) -> int:
        return served.post(body, path, headers={**KEY, **headers}).status_code

    served.frontdoor._limits = DoorLimits(clock_ns=lambda: 0)  # no call comes back, however long this takes
    prompt = {"model": MODEL, "prompt": "one"}
    assert served.post(prompt).status_code == 401
    assert served.post(prompt, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert ask(prompt) == 200
    assert ask(b"{") == 400
    assert ask({**prompt, "best_friend": 1}) == 400
    assert ask({**prompt, "model": "another"}) == 404
    assert ask(prompt, "/v1/nothing") == 404
    assert ask({}, "/v1/requests/job-7/abort") == 404
    assert served.http.get("/v1/completions", headers=KEY).status_code == 405
    assert ask(prompt, **{f"x-{number}": "y" for number in range(40)}) == 400
    assert [ask(prompt) for _ in range(5)].count(429) == 1
    with served.connect() as connection:
        connection.sendall(b"NONSENSE\r\n\r\n")
        assert read_until_closed(connection).startswith(b"HTTP/1.1 400")
    assert values(served.registry, "coppice_calls_failed_total") == {
        ("invalid_api_key", NO_TENANT): 2,
        ("invalid_json", "a"): 1,
        ("unknown_parameter", "a"): 1,
        ("model_not_found", "a"): 1,
        ("request_not_found", "a"): 1,
        ("not_found", NO_TENANT): 1,
        ("method_not_allowed", NO_TENANT): 1,
        ("too_many_headers", NO_TENANT): 1,
        ("tenant_rate", "a"): 1,
        ("invalid_http", NO_TENANT): 1,
    }
    assert values(served.registry, "coppice_calls_total") == {
        (COMPLETIONS, "200"): 5,
        (COMPLETIONS, "400"): 3,
        (COMPLETIONS, "401"): 2,
        (COMPLETIONS, "404"): 1,
        (COMPLETIONS, "429"): 1,
        ("POST /v1/requests/{request_id}/abort", "404"): 1,
        (OTHER, "404"): 1,
        (OTHER, "405"): 1,
        (OTHER, "400"): 1,
    }


def test_a_connection_too_many_is_counted_once() -> None:
    with serving(max_connections=1, excess_connections=2) as served:
        with served.connect() as kept, served.connect() as excess:
            kept.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert kept.recv(1)  # it is open, and stays so
            excess.sendall(b"GET /v1/models HTTP/1.1\r\n")
            assert read_until_closed(excess).startswith(b"HTTP/1.1 503")
        assert values(served.registry, "coppice_calls_failed_total") == {("too_many_connections", NO_TENANT): 1}


def test_health_is_no_call(served: Served) -> None:
    assert served.http.get("/healthz").status_code == 200
    assert not values(served.registry, "coppice_calls_total")


def test_an_answers_life_is_counted_whole_and_streamed_failed_too(served: Served) -> None:
    stages = (
        Stage(StageKind.POOL_FULL, 0, 2 * S),
        Stage(StageKind.PREFILL, 2 * S, 3 * S),
        Stage(StageKind.DECODE, 3 * S, 5 * S),
    )
    served.engine.script = lambda request: Script([5, 6], stages=stages, num_cached_tokens=3)
    ask = {"model": MODEL, "prompt": "one two three four"}
    for body in (ask, {**ask, "stream": True}):
        assert served.post(body, headers=KEY).status_code == 200
    error = OutputError(OutputErrorCode.WORKER_LOST, "gone")
    served.engine.script = lambda request: Script([5], stages=stages, error=error)
    assert served.post(ask, headers=KEY).status_code == 503
    registry = served.registry

    def spent() -> dict[tuple[str, ...], float]:
        return values(registry, "coppice_request_time_seconds_total")

    wait_for(
        lambda: values(registry, "coppice_calls_total") == {(COMPLETIONS, "200"): 2, (COMPLETIONS, "503"): 1}, "ends"
    )
    assert spent() == {("pool_full", MODEL, "a"): 6, ("prefill", MODEL, "a"): 3, ("decode", MODEL, "a"): 6}
    assert values(registry, "vllm:request_queue_time_seconds_sum") == {(MODEL, "a"): 4}
    assert values(registry, "vllm:request_inference_time_seconds_sum") == {(MODEL, "a"): 6}
    assert values(registry, "vllm:prompt_tokens_cached_total") == {(MODEL, "a"): 6}
    assert values(registry, "vllm:e2e_request_latency_seconds_count") == {(MODEL, "a"): 2}
    durations = values(registry, "gen_ai_server_request_duration_seconds_count")
    assert sorted((labels[0], count) for labels, count in durations.items()) == [("", 2), ("worker_lost", 1)]
