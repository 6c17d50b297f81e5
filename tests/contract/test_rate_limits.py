"""What is left of a tenant's limits per minute is on every answer: by OpenAI's names, Anthropic's, and over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import grpc
import httpx
import pytest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_scheduler.core.state.request import (
    LimitLeft,
    OutputError,
    OutputErrorCode,
    Refused,
    RefusedReason,
    TenantLimitsLeft,
)
from coppice_scheduler.edge.http.rate_headers import anthropic_rate_headers
from tests.fakes.api import grpc_served
from tests.fakes.api.engine import Script, echo
from tests.fakes.api.rest import MODEL, Served, serving

LEFT = TenantLimitsLeft(LimitLeft(1000, 7, 53_000), LimitLeft(600, 450, 15_250))
TOLD = {
    "limit-requests": "1000", "remaining-requests": "7", "reset-requests": "53s",
    "limit-tokens": "600", "remaining-tokens": "450", "reset-tokens": "15.25s",
}  # fmt: skip
TENANTS = TenantDirectory(
    [
        Tenant(id="a", api_key_sha256=(digest_of_key("key-a"),), requests_per_minute=1000, tokens_per_minute=600),
        Tenant(id="b", api_key_sha256=(digest_of_key("key-b"),)),
        Tenant(id="c", api_key_sha256=(digest_of_key("key-c"),), requests_per_minute=1),
    ]
)
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "one"}]}
MESSAGE: dict[str, Any] = {**CHAT, "max_tokens": 2}
ROUTES: dict[str, tuple[str, dict[str, Any] | None, int]] = {
    "/v1/chat/completions": ("POST", CHAT, 200),
    "/v1/completions": ("POST", {"model": MODEL, "prompt": "one"}, 200),
    "/v1/responses": ("POST", {"model": MODEL, "input": "one"}, 200),
    "/v1/messages": ("POST", MESSAGE, 200),
    "/v1/messages/count_tokens": ("POST", CHAT, 200),
    "/tokenize": ("POST", {"prompt": "one"}, 200),
    "/v1/detokenize": ("POST", {"tokens": [5]}, 200),
    "/v1/models": ("GET", None, 200),
    f"/v1/models/{MODEL}": ("GET", None, 200),
    "/v1/requests/job-7/abort": ("POST", None, 404),
}
REFUSALS = [
    Refused(RefusedReason.TENANT_RATE, "used up", 100),
    Refused(RefusedReason.TENANT_CONCURRENCY, "too many at work", 100),
    Refused(RefusedReason.TENANT_QUEUE, "too many wait", 100),
    Refused(RefusedReason.QUEUE_FULL, "full", 100),
    Refused(RefusedReason.DEADLINE, "too late", 100),
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with serving(TENANTS) as served:
        yield served


@pytest.fixture
def served(shared: Served) -> Served:
    shared.engine.script = echo
    shared.engine.limits_left = {"a": LEFT}
    shared.http.headers["authorization"] = "Bearer key-a"
    return shared


def ask(served: Served, path: str, **more: Any) -> httpx.Response:
    method, body, _ = ROUTES[path]
    return served.http.request(method, path, json=body if body is None else {**body, **more})


def left_in(answer: httpx.Response) -> dict[str, str]:
    return {name[12:]: value for name, value in answer.headers.multi_items() if name.startswith("x-ratelimit-")}


def of_anthropic(answer: httpx.Response) -> dict[str, str]:
    return {name[20:]: value for name, value in answer.headers.items() if name.startswith("anthropic-ratelimit-")}


@pytest.mark.parametrize("path", ROUTES)
def test_every_answer_to_a_tenant_tells_them(served: Served, path: str) -> None:
    answer = ask(served, path)
    assert answer.status_code == ROUTES[path][2]
    assert left_in(answer) == TOLD
    assert len(answer.headers.get_list("x-ratelimit-limit-tokens")) == 1
    assert bool(of_anthropic(answer)) is path.startswith("/v1/messages")


def test_this_front_door_may_have_counted_more(served: Served) -> None:
    served.engine.limits_left = {"a": TenantLimitsLeft(LimitLeft(1000, 1000, 0), None)}
    left = left_in(served.complete())
    assert int(left["remaining-requests"]) < 1000
    assert "limit-tokens" not in left


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("refused", REFUSALS, ids=[refused.reason.value for refused in REFUSALS])
def test_a_call_beyond_a_limit_is_told_what_is_left(served: Served, refused: Refused, path: str, stream: bool) -> None:
    served.engine.script = lambda request: Script([], refused=refused)
    answer = ask(served, path, stream=stream)
    assert (answer.status_code, answer.headers["retry-after-ms"]) == (429, "100")
    assert left_in(answer) == TOLD


@pytest.mark.parametrize("code", [OutputErrorCode.QUEUE_TIMEOUT, OutputErrorCode.TENANT_MAXIMUM])
def test_so_is_one_that_waited_in_vain(served: Served, code: OutputErrorCode) -> None:
    served.engine.script = lambda request: Script([], error=OutputError(code, "waited", 100))
    answer = served.complete()
    assert (answer.status_code, left_in(answer)) == (429, TOLD)


@pytest.mark.parametrize("path", ROUTES)
def test_the_door_counts_calls_of_all_routes(path: str) -> None:
    with serving(TENANTS) as served:
        served.http.headers["authorization"] = "Bearer key-c"
        assert ask(served, path).status_code == ROUTES[path][2]
        answer = ask(served, path)
    assert answer.status_code == 429
    left = left_in(answer)
    assert (left["limit-requests"], left["remaining-requests"]) == ("1", "0")
    assert 0 < float(left["reset-requests"].rstrip("s")) <= 60
    assert bool(of_anthropic(answer)) is path.startswith("/v1/messages")


@pytest.mark.parametrize(("body", "status"), [({"hue": 1}, 400), ({"model": "x"}, 404), ({"user": "x" * 2**21}, 413)])
def test_other_refusals_tell_them_too(served: Served, body: dict[str, Any], status: int) -> None:
    answer = served.complete(**body)
    assert (answer.status_code, left_in(answer)) == (status, TOLD)


def test_nobody_else_hears_of_them(served: Served) -> None:
    for key, status in (("key-b", 200), ("wrong", 401)):
        served.http.headers["authorization"] = f"Bearer {key}"
        answer = ask(served, "/v1/messages")
        assert (answer.status_code, left_in(answer), of_anthropic(answer)) == (status, {}, {})
    served.http.headers["authorization"] = "Bearer key-a"
    assert not left_in(served.http.get("/healthz"))


def test_the_anthropic_api_has_names_and_times_of_its_own(served: Served) -> None:
    before = datetime.now(UTC)
    told = of_anthropic(ask(served, "/v1/messages"))
    resets = {name: datetime.fromisoformat(told.pop(f"{name}-reset")) for name in ("requests", "tokens")}
    assert told == {
        "requests-limit": "1000", "requests-remaining": "7", "tokens-limit": "600", "tokens-remaining": "450",
    }  # fmt: skip
    assert (resets["requests"] - before).total_seconds() >= 53 > 15.25
    assert before < resets["tokens"] < resets["requests"]
    assert anthropic_rate_headers(LEFT, 1.5)["anthropic-ratelimit-tokens-reset"] == "1970-01-01T00:00:17Z", "rounded up"


def test_they_are_described(served: Served) -> None:
    paths = served.http.get("/openapi.json").json()["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            is_open = operation.get("security") == []
            for status, response in operation["responses"].items():
                told = {name for name in response.get("headers", {}) if "ratelimit" in name}
                num_names = 0 if is_open or status in ("401", "500") else 12 if path.startswith("/v1/messages") else 6
                assert len(told) == num_names, (path, status)


# ---- gRPC

KEY = (("authorization", "Bearer key-a"),)


def left_behind(call: Any) -> dict[str, str]:
    """In the trailing metadata."""
    return {name[12:]: value for name, value in call.trailing_metadata() or () if name.startswith("x-ratelimit-")}


def test_calls_over_grpc_end_with_them() -> None:
    async def test(served: grpc_served.Served) -> None:
        served.engine.limits_left = {"a": LEFT}
        calls = {
            served.stub.Generate: pb.GenerateRequest(model=MODEL, text="one", max_tokens=1),
            served.stub.ListModels: pb.ListModelsRequest(),
            served.stub.Tokenize: pb.TokenizeRequest(model=MODEL, text="one"),
        }
        for method, request in calls.items():
            call = method(request, timeout=grpc_served.WAIT_S, metadata=KEY)
            if method is served.stub.Generate:
                assert [answer async for answer in call]
            else:
                await call
            trailing = dict([*await call.trailing_metadata()])
            assert {name[12:]: value for name, value in trailing.items() if name.startswith("x-ratelimit-")} == TOLD
            assert trailing["x-request-id"]

    grpc_served.serve(test, TENANTS)


def test_refusals_over_grpc_have_them() -> None:
    async def test(served: grpc_served.Served) -> None:
        served.engine.limits_left = {"a": LEFT}
        for refused in REFUSALS:
            served.says("", refused=refused)
            error = await served.refusal(metadata=KEY)
            assert (error.code(), left_behind(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, TOLD)
        assert not left_behind(await served.refusal(metadata=(("authorization", "Bearer wrong"),)))
        served.engine.script = echo
        key = (("authorization", "Bearer key-c"),)
        await served.ask(metadata=key)
        error = await served.refusal(metadata=key)
        assert left_behind(error)["remaining-requests"] == "0"

    grpc_served.serve(test, TENANTS)
