"""Each request leaves one record, whatever becomes of it: what its client was told, and nothing that it said."""

from __future__ import annotations

import asyncio
import time

import grpc
import httpx
import pytest

from coppice.request_log.record import RequestRecord, encoded
from coppice.request_log.stages import Stage, StageKind
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import ApiKey, digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import Refused, RefusedReason
from tests.fakes.api import grpc_served
from tests.fakes.api.engine import Script
from tests.fakes.api.rest import MODEL, Served, events_of, serving

KEY = "key-that-nobody-may-see"
PROMPT = "words that nobody may see"
TENANTS = TenantDirectory(
    [Tenant(id="search", api_key_sha256=(ApiKey(sha256=digest_of_key(KEY), name="ci"),), requests_per_minute=1000)],
    version="1",
)
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 9}
SHORT_NS = 20_000  # no call is answered faster
BY_KEY = {"authorization": f"Bearer {KEY}"}


def record_of(served: Served, request_id: str) -> RequestRecord:
    (record,) = served.records.of(request_id)
    return record


def sent(served: Served, request_id: str, body: object = BODY, **options: object) -> httpx.Response:
    headers = {**BY_KEY, "x-request-id": request_id, **options.pop("headers", {})}  # type: ignore[dict-item]
    return served.post(body, headers=headers, **options)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_what_a_client_is_told_is_recorded(streams: bool) -> None:
    with serving(TENANTS) as served:
        served.says("ok", num_cached_tokens=1, num_written_tokens=2)
        body = {**BODY, "stream": streams, **({"stream_options": {"include_usage": True}} if streams else {})}
        answer = sent(served, "job-7", body)
        told = events_of(answer.text)[-2] if streams else answer.json()
        record = record_of(served, "job-7")
        assert record.call == told["id"]
        assert (record.tenant, record.key, record.model) == ("search", "ci", MODEL)
        assert (record.api, record.status, record.end) == ("POST /v1/completions", 200, "stop")
        assert (record.streams, record.num_answers, record.client) == (streams, 1, "127.0.0.1")
        assert record.tokens_in == told["usage"]["prompt_tokens"]
        assert record.tokens_out == told["usage"]["completion_tokens"]
        assert record.tokens_cached == told["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
        assert 0 < record.ttft_ms <= record.total_ms
        line = encoded(record).decode()
        assert KEY not in line
        assert "nobody may see" not in line


def test_where_the_time_went_is_told_from_its_arrival_on() -> None:
    with serving(TENANTS) as served:
        now_ns = time.monotonic_ns()
        stages = (
            Stage(StageKind.POOL_FULL, now_ns, now_ns + 400_000_000, "batch", 412),
            Stage(StageKind.PREFILL, now_ns + 400_000_000, now_ns + 500_000_000, "w0", 7),
        )
        served.says("ok", stages=stages, chunks=((now_ns + 400_000_000, now_ns + 500_000_000, 7),))
        sent(served, "slow")
        record = record_of(served, "slow")
        assert (record.cause, record.blocker, record.queue_ms) == ("pool_full", "batch", 400.0)
        (waited, computed), (chunk,) = record.stages[:2], record.chunks
        assert (waited[0], waited[3:], round(waited[2] - waited[1], 3)) == ("pool_full", ("batch", 412), 400.0)
        assert computed[1] == waited[2]
        assert (chunk[:2], chunk[2]) == (computed[1:3], 7)


def test_times_of_another_machines_clock_are_put_where_they_belong() -> None:
    with serving(TENANTS) as served:
        far_ns = time.monotonic_ns() - 10**15
        served.says("ok", stages=(Stage(StageKind.DECODE, far_ns, far_ns + SHORT_NS, "w0"),))
        sent(served, "far")
        record = record_of(served, "far")
        before, (kind, start_ms, end_ms, *_) = record.stages
        assert (kind, round(end_ms - start_ms, 3)) == ("decode", SHORT_NS / 1e6)
        assert before[:3] == ("front_door", 0.0, start_ms)
        assert end_ms == pytest.approx(record.total_ms, abs=50.0)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_the_time_at_the_front_door_is_a_metric_too(streams: bool) -> None:
    with serving(TENANTS) as served:
        far_ns = time.monotonic_ns() - 10**15
        served.says("ok", stages=(Stage(StageKind.DECODE, far_ns, far_ns + SHORT_NS, "w0"),))
        sent(served, "far", {**BODY, "stream": streams})
        whole_s = record_of(served, "far").total_ms / 1e3
        spent = {
            kind: served.registry.get_sample_value(
                "coppice_request_time_seconds_total", {"model_name": MODEL, "tenant": "search", "cause": kind}
            )
            for kind in ("front_door", "decode", "moved")
        }
        assert (spent["decode"], spent["moved"]) == (pytest.approx(SHORT_NS / 1e9), 0)
        assert spent["front_door"] is not None
        assert 0 < spent["front_door"] <= whole_s


@pytest.mark.parametrize(
    ("body", "headers", "status", "end", "tenant"),
    [
        (BODY, {"authorization": "Bearer wrong"}, 401, "invalid_api_key", ""),
        ("{", {}, 400, "invalid_json", "search"),
        ({**BODY, "no_such_field": 1}, {}, 400, "unknown_parameter", "search"),
        ({**BODY, "model": "other"}, {}, 404, "model_not_found", "search"),
    ],
    ids=["no key", "no JSON", "unknown field", "another model"],
)
def test_a_refusal_at_the_door_is_recorded(
    body: object, headers: dict[str, str], status: int, end: str, tenant: str
) -> None:
    with serving(TENANTS) as served:
        assert sent(served, "no", body, headers=headers).status_code == status
        record = record_of(served, "no")
        assert (record.status, record.tenant, record.tokens_in) == (status, tenant, 0)
        assert record.end == end


def test_so_is_one_of_the_core_and_a_path_that_is_not_there() -> None:
    with serving(TENANTS) as served:
        served.engine.script = lambda request: Script([], refused=Refused(RefusedReason.TENANT_RATE, "used up", 5))
        assert sent(served, "rate").status_code == 429
        assert (record_of(served, "rate").status, record_of(served, "rate").end) == (429, "tenant_rate")
        served.http.get("/nowhere", headers={"x-request-id": "lost"})
        assert (record_of(served, "lost").api, record_of(served, "lost").end) == ("GET /nowhere", "not_found")
        served.http.get("/healthz", headers={"x-request-id": "probe"})
        served.http.get("/v1/models", headers={**BY_KEY, "x-request-id": "models"})
        assert record_of(served, "models").status == 200
        assert served.records.of("probe", 0) == []


def test_a_client_that_hangs_up_is_recorded_once() -> None:
    with serving(TENANTS) as served:
        served.engine.script = lambda request: Script([65, 66], hangs=True)
        body = {**BODY, "stream": True}
        with served.http.stream(
            "POST", "/v1/completions", json=body, headers={**BY_KEY, "x-request-id": "gone"}
        ) as answer:
            next(answer.iter_bytes())
            assert served.engine.some_hanging.wait(60)
        record = record_of(served, "gone")
        assert (record.status, record.end, record.tokens_out) == (499, "cancelled", 2), "what it had was used"
        assert record.tokens_in > 0


def test_calls_over_grpc_are_recorded_alike() -> None:
    async def test(served: grpc_served.Served) -> None:
        served.says("ok", num_cached_tokens=1)
        await served.ask(metadata=(("authorization", f"Bearer {KEY}"), ("x-request-id", "g1")), text=PROMPT)
        (record,) = await asyncio.to_thread(served.records.of, "g1")
        assert (record.api, record.status, record.end, record.tenant) == ("gRPC Generate", 200, "stop", "search")
        assert (record.tokens_cached, record.num_answers) == (1, 1)
        assert record.tokens_out > 0
        with pytest.raises(grpc.aio.AioRpcError):
            await served.ask(metadata=(("x-request-id", "g2"),))
        (refused,) = await asyncio.to_thread(served.records.of, "g2")
        assert (refused.status, refused.end, refused.tenant) == (401, "invalid_api_key", "")

    grpc_served.serve(test, TENANTS)
