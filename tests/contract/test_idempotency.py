"""`Idempotency-Key`: what is sent again is computed once, whoever lost the first answer."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import generate_latest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.http.field_table import IGNORED_HEADER
from tests.contract.test_abort import BODIES
from tests.fakes.api.rest import MODEL, WAIT_S, Served, error_of, serving
from tests.fakes.waiting import wait_for

TENANTS = TenantDirectory([Tenant(id=name, api_key_sha256=(digest_of_key(f"key-{name}"),)) for name in "ab"])
PROMPT = {"model": MODEL, "prompt": "one"}


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(TENANTS) as served:
        served.says("fine")
        yield served


def headers(tenant: str = "a", key: str = "k") -> dict[str, str]:
    return {"authorization": f"Bearer key-{tenant}", "idempotency-key": key}


def ask(served: Served, path: str = "/v1/completions", tenant: str = "a", **fields: object) -> httpx.Response:
    return served.post({"model": MODEL, **BODIES[path], **fields}, path, headers=headers(tenant))


@pytest.mark.parametrize("path", BODIES)
def test_the_same_bytes_are_told_again(served: Served, path: str) -> None:
    first, again = ask(served, path), ask(served, path)
    assert (first.status_code, again.status_code, first.content) == (200, 200, again.content)
    assert ("idempotent-replayed" in first.headers, again.headers["idempotent-replayed"]) == (False, "true")
    assert len(served.engine.requests) == 1
    text = generate_latest(served.registry).decode()
    assert f'coppice_requests_replayed_total{{model_name="{MODEL}",tenant="a"}} 1.0' in text


def test_another_tenant_and_another_call_do_not_get_it(served: Served) -> None:
    first = ask(served)
    assert ask(served, tenant="b").json()["id"] != first.json()["id"]
    for other in (ask(served, max_tokens=3), ask(served, "/v1/chat/completions")):
        assert error_of(other, 422)["code"] == "idempotency_key_reused"
    assert len(served.engine.requests) == 2


def test_a_client_that_went_away_finds_the_answer_and_meanwhile_waits(served: Served) -> None:
    served.says("fine", hangs=True)
    sent = "authorization: Bearer key-a\r\nidempotency-key: k\r\n"
    body = b'{"model": "%s", "prompt": "one"}' % MODEL.encode()
    served.begin(body, headers=sent).close()
    assert served.engine.some_hanging.wait(WAIT_S)
    with ThreadPoolExecutor(1) as threads:
        again = threads.submit(served.post, body, headers=headers())
        wait_for(lambda: served.engine.num_claims == 2, "the second one")
        assert not again.done()
        loop, (request,) = served.engine.loop, served.engine.requests
        assert loop is not None
        loop.call_soon_threadsafe(served.engine.let_go, request.request_id)
        answer = again.result(WAIT_S)
    assert (answer.status_code, answer.headers["idempotent-replayed"]) == (200, "true")
    assert (served.engine.cancelled, len(served.engine.requests)) == ([], 1)


def test_an_abort_ends_it_for_all_and_it_may_be_sent_again(served: Served) -> None:
    served.says("fine", hangs=True)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(served.post, PROMPT, headers={**headers(), "x-request-id": "job"})
        assert served.engine.some_hanging.wait(WAIT_S)
        again = threads.submit(served.post, PROMPT, headers=headers())
        wait_for(lambda: served.engine.num_claims == 2, "the second one")
        served.http.post("/v1/requests/job/abort", headers=headers())
        assert [call.result(WAIT_S).status_code for call in (first, again)] == [499, 499]
    served.says("fine")
    assert "idempotent-replayed" not in served.post(PROMPT, headers=headers()).headers


def test_errors_are_not_kept(served: Served) -> None:
    served.engine.ready = False
    assert ask(served).status_code == 503
    served.engine.ready = True
    assert ask(served).status_code == 200
    assert error_of(served.post(PROMPT, headers=headers(key="x" * 256)), 400)["code"] == "invalid_idempotency_key"


def test_a_stream_says_that_it_is_not_kept(served: Served) -> None:
    for _ in range(2):
        assert ask(served, stream=True).headers[IGNORED_HEADER] == "idempotency-key"
    assert len(served.engine.requests) == 2


def test_the_second_try_of_the_client_itself_gets_the_first_answer(served: Served) -> None:
    class LosesTheFirst(httpx.HTTPTransport):
        num_sent = 0

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            response = super().handle_request(request)
            response.read()
            self.num_sent += 1
            if self.num_sent == 1:
                raise httpx.ReadError("the connection was lost", request=request)
            return response

    transport = LosesTheFirst()
    with httpx.Client(transport=transport, timeout=WAIT_S) as http:
        options: dict[str, Any] = {"http_client": http}
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="key-a", max_retries=1, **options)
        answer = client.completions.create(model=MODEL, prompt="one", extra_headers={"idempotency-key": "k"})
    assert (answer.choices[0].text, transport.num_sent, len(served.engine.requests)) == ("fine", 2, 1)
    text = generate_latest(served.registry).decode()
    succeeded = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
    (line,) = [line for line in succeeded if not line.endswith(" 0.0")]
    assert line.endswith(" 1.0")
