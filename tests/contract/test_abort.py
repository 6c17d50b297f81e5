"""A tenant ends its own calls by the id that it knows, over REST: who hears what, and who hears nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest
from prometheus_client import generate_latest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode
from tests.fakes.api.rest import MODEL, WAIT_S, Served, error_of, events_of, serving
from tests.fakes.waiting import wait_for

TENANTS = TenantDirectory(
    [Tenant(id=name, api_key_sha256=(digest_of_key(f"key-{name}"),)) for name in "ab"]
    + [Tenant(id="c", api_key_sha256=(digest_of_key("key-c"),), requests_per_minute=1)]
)
USER = [{"role": "user", "content": "one"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "one"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}
ID = "job:7.a_b-c"


@pytest.fixture
def served() -> Iterator[Served]:
    """Whose answers hang after their first word, until something ends them."""
    with serving(TENANTS) as served:
        served.says("fine", hangs=True)
        yield served


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def headers(tenant: str, request_id: str | None = None) -> dict[str, str]:
    return {"authorization": f"Bearer key-{tenant}"} | ({"x-request-id": request_id} if request_id else {})


def abort(served: Served, request_id: str, tenant: str = "a", **options: Any) -> httpx.Response:
    return served.http.post(f"/v1/requests/{request_id}/abort", headers=headers(tenant), **options)


class Calls:
    """Calls that hang."""

    def __init__(self, served: Served, threads: ThreadPoolExecutor) -> None:
        self._served = served
        self._threads = threads

    def begin(
        self, path: str = "/v1/completions", tenant: str = "a", request_id: str | None = ID, n: int = 1, **fields: Any
    ) -> Future[httpx.Response]:
        engine = self._served.engine
        num_before = len(engine.requests)
        body = {"model": MODEL, **BODIES[path], **({"n": n} if n != 1 else {}), **fields}
        call = self._threads.submit(self._served.post, body, path, headers=headers(tenant, request_id))
        num_answers = n * (len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1)
        wait_for(lambda: len(engine.requests) == num_before + num_answers, "the engine to have them")
        return call


@pytest.fixture
def calls(served: Served, threads: ThreadPoolExecutor) -> Calls:
    return Calls(served, threads)


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_ends_with_an_error_of_its_own_status(served: Served, calls: Calls, path: str) -> None:
    call = calls.begin(path)
    answer = abort(served, ID)
    assert (answer.status_code, answer.json()) == (200, {"id": ID, "object": "request.aborted", "num_answers": 1})
    ended = call.result(WAIT_S)
    assert ended.status_code == 499, "clients of these APIs send 409 and 5xx again by themselves"
    assert ended.headers["x-request-id"] == ID
    error = ended.json()["error"]
    if path == "/v1/messages":
        assert (error["type"], error["message"]) == ("invalid_request_error", "The request was aborted.")
    else:
        assert (error["type"], error["code"]) == ("aborted_error", "request_aborted")
    assert "retry-after" not in ended.headers


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_ends_with_the_error_of_its_api(served: Served, threads: ThreadPoolExecutor, path: str) -> None:
    body = {"model": MODEL, **BODIES[path], "stream": True}
    with served.http.stream("POST", path, json=body, headers=headers("a", ID)) as stream:
        lines = stream.iter_lines()
        assert next(line for line in lines if line.startswith("data: "))
        assert threads.submit(abort, served, ID).result(WAIT_S).status_code == 200
        rest = "\n".join(lines)
    events = [json.loads(line.removeprefix("data: ")) for line in rest.splitlines() if line.startswith("data: ")]
    last = events[-1]
    if path == "/v1/responses":
        assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
        assert (events[-2]["response"]["error"]["code"], last["code"]) == ("request_aborted", "request_aborted")
    elif path == "/v1/messages":
        assert (last["type"], last["error"]["type"]) == ("error", "invalid_request_error")
    else:
        assert last["error"]["code"] == "request_aborted"


def id_of_stream(path: str, line: str) -> str:
    (event,) = events_of(line)
    return str(
        {"/v1/responses": event.get("response", {}), "/v1/messages": event.get("message", {})}.get(path, event)["id"]
    )


@pytest.mark.parametrize("sent", [None, ID])
@pytest.mark.parametrize("path", BODIES)
def test_the_id_of_the_answer_means_this_call_alone(
    served: Served, calls: Calls, threads: ThreadPoolExecutor, path: str, sent: str | None
) -> None:
    other = calls.begin(request_id=ID)
    body = {"model": MODEL, **BODIES[path], "stream": True}
    with served.http.stream("POST", path, json=body, headers=headers("a", sent)) as stream:
        lines = stream.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        answer_id = id_of_stream(path, first)
        assert answer_id.startswith(("chatcmpl-", "cmpl-", "resp_", "msg_"))
        assert threads.submit(abort, served, answer_id, "b").result(WAIT_S).status_code == 404
        assert threads.submit(abort, served, answer_id).result(WAIT_S).json()["num_answers"] == 1
        assert "abort" in "\n".join(lines)
    assert not other.done()
    assert abort(served, ID).json()["num_answers"] == 1
    assert other.result(WAIT_S).status_code == 499


def test_an_id_of_ours_is_told_by_the_first_bytes_of_a_stream(served: Served, threads: ThreadPoolExecutor) -> None:
    body = {"model": MODEL, "prompt": "one", "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body, headers=headers("a")) as stream:
        ours = stream.headers["x-request-id"]
        assert threads.submit(abort, served, ours).result(WAIT_S).status_code == 200
        assert "request_aborted" in "\n".join(stream.iter_lines())


def test_all_answers_of_all_calls_of_the_id_end_and_are_counted_as_aborted(served: Served, calls: Calls) -> None:
    ended = [calls.begin(n=3), calls.begin("/v1/chat/completions", n=2), calls.begin(prompt=["one", "two"], n=2)]
    kept = [calls.begin(request_id=f"{ID}.2"), calls.begin(tenant="b")]
    wait_for(lambda: served.engine.num_running == 11, "all to run")
    assert abort(served, ID).json()["num_answers"] == 9
    assert {call.result(WAIT_S).status_code for call in ended} == {499}
    assert not any(call.done() for call in kept)
    assert served.engine.num_running == 2
    assert served.engine.cancelled == [], "each request has one end"
    text = generate_latest(served.registry).decode()
    failed = [line for line in text.splitlines() if line.startswith("coppice_requests_failed_total{")]
    failed = [line for line in failed if not line.endswith(" 0.0")]
    assert failed == [f'coppice_requests_failed_total{{code="request_aborted",model_name="{MODEL}",tenant="a"}} 9.0']
    for tenant, request_id in (("a", f"{ID}.2"), ("b", ID)):
        assert abort(served, request_id, tenant).status_code == 200


def test_what_another_tenant_has_is_answered_like_what_nobody_has(served: Served, calls: Calls) -> None:
    call = calls.begin(tenant="b")

    def answer() -> tuple[int, bytes, list[tuple[str, str]]]:
        told = abort(served, ID)
        varying = ("date", "x-request-id", "request-id")
        return told.status_code, told.content, [pair for pair in told.headers.items() if pair[0] not in varying]

    theirs = answer()
    assert theirs[0] == 404
    assert not call.done()
    assert abort(served, ID, "b").status_code == 200
    call.result(WAIT_S)
    assert answer() == theirs
    assert error_of(abort(served, ID), 404)["code"] == "request_not_found"
    assert {question for question in served.engine.aborts if question[0] == "a"} == {("a", (ID,))}, "asked alike"


@pytest.mark.parametrize("asked", ["x" * 65, "a%20b", "%C3%A4", "cmpl-", "*", f"*-{ID}"])
def test_what_can_be_no_id_is_not_found(served: Served, calls: Calls, asked: str) -> None:
    call = calls.begin()
    assert error_of(abort(served, asked), 404)["code"] == "request_not_found"
    assert not call.done()
    assert abort(served, ID, content=b"x" * 100_000).status_code == 200, "a body is not read"
    call.result(WAIT_S)


def test_a_request_that_is_over_is_not_found(served: Served) -> None:
    served.says("fine")
    answer = served.post({"model": MODEL, "prompt": "one"}, headers=headers("a", ID))
    for asked in (ID, answer.json()["id"]):
        assert error_of(abort(served, asked), 404)["param"] == "request_id"


def test_an_abort_needs_a_key_and_counts_as_a_call(served: Served) -> None:
    assert served.http.post(f"/v1/requests/{ID}/abort").status_code == 401
    assert abort(served, ID, "c").status_code == 404
    assert error_of(abort(served, ID, "c"), 429)["code"] == "tenant_rate"
    assert len(served.engine.aborts) == 1
    assert served.http.get(f"/v1/requests/{ID}/abort", headers=headers("a")).status_code == 405


def test_a_planner_that_is_gone_is_no_answer(served: Served) -> None:
    served.engine.lost = OutputError(OutputErrorCode.SCHEDULER_LOST, "it is gone", 1000)
    answer = abort(served, ID)
    assert error_of(answer, 503)["code"] == "scheduler_lost"
    assert answer.headers["retry-after-ms"] == "1000"


CLIENTS: list[Callable[[Served], Any]] = [
    lambda served: openai.OpenAI(base_url=f"{served.url}/v1", api_key="key-a").completions.create(
        model=MODEL, prompt="x", extra_headers={"x-request-id": ID}
    ),
    lambda served: anthropic.Anthropic(base_url=served.url, api_key="key-a").messages.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=9, extra_headers={"x-request-id": ID}
    ),
]


@pytest.mark.parametrize("create", CLIENTS)
def test_clients_do_not_send_again_what_was_aborted(
    served: Served, threads: ThreadPoolExecutor, create: Callable[[Served], Any]
) -> None:
    call = threads.submit(create, served)
    assert served.engine.some_hanging.wait(WAIT_S)
    assert abort(served, ID).status_code == 200
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match="aborted"):
        call.result(WAIT_S)
    assert len(served.engine.requests) == 1


def test_a_key_may_come_as_for_messages(served: Served) -> None:
    answer = served.http.post(f"/v1/requests/{ID}/abort", headers={"x-api-key": "key-a"})
    assert error_of(answer, 404)["code"] == "request_not_found"
