"""What one tenant's key cannot do to others at the front door over REST: long texts, floods, unfinished bodies."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from prometheus_client import generate_latest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.base.json_size import MAX_MEMBERS
from coppice_scheduler.edge.frontend import frontdoor
from coppice_scheduler.edge.frontend.body_budget import SMALL_BYTES, BodyBudget
from coppice_scheduler.edge.frontend.generation_spec import MAX_LOGIT_BIASES, MAX_MESSAGES
from coppice_scheduler.edge.frontend.loop_share import UNIT_BYTES, LoopShare
from coppice_scheduler.edge.frontend.text_work import SHORT_SIZE, SHORT_THREADS
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.rest import CONTEXT, DEMO, MODEL, WAIT_S, Served, error_of, read_until_closed, serving
from tests.fakes.held_tokenizer import HELD, HeldTokenizer, held_checkpoint
from tests.fakes.seen_text_work import SeenTextWork
from tests.fakes.waiting import wait_for

__all__ = ["served", "shared_server"]

TENANTS = TenantDirectory(
    [
        Tenant(id="a", api_key_sha256=(digest_of_key("key-a"),), requests_per_minute=3),
        Tenant(id="b", api_key_sha256=(digest_of_key("key-b"),)),
        Tenant(id="c", api_key_sha256=(digest_of_key("key-c"),)),
        Tenant(id="d", api_key_sha256=(digest_of_key("key-d"),)),
    ]
)


def key(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-{tenant}"}


# --- long texts ---------------------------------------------------------------------------------------------------


@contextmanager
def holding() -> Iterator[tuple[Served, HeldTokenizer, ThreadPoolExecutor]]:
    """A server that holds marked texts in its tokenizer, and threads to call it from."""
    checkpoint, tokenizer = held_checkpoint(DEMO)
    with serving(TENANTS, checkpoint=checkpoint, context=1 << 20) as served, ThreadPoolExecutor(32) as threads:
        try:
            yield served, tokenizer, threads
        finally:
            tokenizer.let_go.set()


def test_others_are_answered_while_long_texts_of_one_tenant_are_tokenised() -> None:
    with holding() as (served, tokenizer, threads):
        body = {"prompt": HELD + "x" * SHORT_SIZE}
        long = [threads.submit(served.post, body, "/tokenize", headers=key("b")) for _ in range(20)]
        wait_for(lambda: tokenizer.texts, "a long text to be begun")
        short = served.post({"model": MODEL, "prompt": "one", "max_tokens": 1}, headers=key("c"))
        assert short.status_code == 200
        other = served.post({"prompt": "y" * (SHORT_SIZE + 1)}, "/tokenize", headers=key("c"))
        assert other.status_code == 200
        assert len([text for text in tokenizer.texts if text.startswith(HELD)]) == 1
        assert not any(call.done() for call in long)
        tokenizer.let_go.set()
        assert {call.result(WAIT_S).status_code for call in long} == {200}


def test_who_goes_away_is_not_tokenised_for() -> None:
    with holding() as (served, tokenizer, threads):
        running = [
            threads.submit(served.post, {"prompt": f"{HELD} {number}"}, "/tokenize", headers=key("b"))
            for number in range(SHORT_THREADS)
        ]
        wait_for(lambda: len(tokenizer.texts) == SHORT_THREADS, "the threads to be taken")
        with unfinished(served, b'{"model": "%s", "prompt": "gone"}' % MODEL.encode(), "b", is_whole=True):
            after = threads.submit(served.post, {"prompt": "after"}, "/tokenize", headers=key("b"))
        wait_for(lambda: b'code="cancelled"' in generate_latest(served.registry), "the call to be cancelled")
        tokenizer.let_go.set()
        assert {call.result(WAIT_S).status_code for call in (*running, after)} == {200}
        assert tokenizer.texts[SHORT_THREADS:] == ["after"]


def test_large_bodies_are_read_beside_the_loop() -> None:
    seen: dict[bool, threading.Thread] = {}

    def parse(raw: bytes) -> None:
        seen[len(raw) > SHORT_SIZE] = threading.current_thread()

    with serving() as served:
        read, tenant = served.frontdoor.read, TENANTS.tenants[0]

        async def test() -> None:
            await read(tenant, bytes(SHORT_SIZE), parse)
            await read(tenant, bytes(SHORT_SIZE + 1), parse)

        asyncio.run(test())
    assert seen[False] == threading.current_thread() != seen[True]


class SeenLoopShare(LoopShare):
    def __init__(self) -> None:
        super().__init__()
        self.units = 0

    async def take(self, tenant: str, units: int) -> None:
        self.units += units
        await super().take(tenant, units)


def test_every_route_takes_large_bodies_in_shares_and_reads_them_beside_the_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = served.http.get("/openapi.json").json()["paths"]
    takes_body = [path for path, operations in paths.items() if "requestBody" in operations.get("post", {})]
    assert len(takes_body) >= 9
    body = b" " * (SHORT_SIZE + UNIT_BYTES)
    for path in takes_body:
        work, share = SeenTextWork(), SeenLoopShare()
        monkeypatch.setattr(served.frontdoor, "text_work", work)
        monkeypatch.setattr(served.frontdoor, "loop_share", share)
        assert served.post(body, path).status_code == 400
        assert work.sizes == [len(body)], path
        assert share.units >= len(body) // UNIT_BYTES, path


def test_tokens_become_text_and_json_beside_the_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    work = SeenTextWork()
    monkeypatch.setattr(served.frontdoor, "text_work", work)
    assert served.post({"tokens": [5] * 1000}, "/v1/detokenize").status_code == 200
    count = served.post({"prompt": "one two three"}, "/v1/tokenize").json()["count"]
    assert work.sizes == [4 * 1000, 4 * count]


def test_prompts_are_rendered_and_tokenised_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontdoor, "TextWork", SeenTextWork)
    with serving() as served:
        work = served.frontdoor.text_work
        assert isinstance(work, SeenTextWork)
        assert served.complete(max_tokens=1).status_code == 200
        assert work.sizes == [len("one")]
        assert served.chat(max_tokens=1).status_code == 200
        assert len(work.sizes) == 2


# --- lengths first ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logit_bias": {str(i): None for i in range(MAX_LOGIT_BIASES + 1)}}, "logit_bias has 1025 entries; at most"),
        ({"stop": [0] * 17}, "stop has 17 strings; at most"),
        ({"stop_token_ids": ["x"] * 65}, "stop_token_ids has 65 ids; at most"),
        ({"prompt": [5] * CONTEXT + ["x"]}, f"the prompt has {CONTEXT + 1} tokens"),
        ({"prompt": [[5], [5] * CONTEXT + ["x"]]}, f"the prompt has {CONTEXT + 1} tokens"),
    ],
)
def test_lengths_are_looked_at_before_entries(served: Served, fields: dict[str, Any], words: str) -> None:
    assert words in error_of(served.complete(**fields), 400)["message"]


def test_messages_are_counted_before_they_are_read(served: Served) -> None:
    message = error_of(served.chat(messages=[0] * (MAX_MESSAGES + 1)), 400)["message"]
    assert message == f"messages has {MAX_MESSAGES + 1} entries; at most {MAX_MESSAGES} are taken"


def test_a_body_of_very_many_names_is_refused_before_it_is_parsed(served: Served) -> None:
    names = ",".join(f'"{number}":1' for number in range(MAX_MEMBERS - 1))
    assert error_of(served.post(f'{{"logit_bias":{{{names}}}, no JSON'), 400)["code"] == "invalid_json"
    assert error_of(served.post(f'{{"logit_bias":{{{names}}}, "x": no JSON'), 400)["code"] == "too_complex"
    text = json.dumps({"model": MODEL, "prompt": '":\\"' * MAX_MEMBERS})
    assert error_of(served.post(text), 400)["code"] == "context_length_exceeded", "colons in a text are just text"


# --- requests per minute ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {"prompt": "one"}, 200),
        ("/v1/detokenize", {"tokens": [5]}, 200),
        ("/v1/completions", {"model": MODEL, "prompt": "one", "max_tokens": 1}, 200),
        ("/v1/completions", {"model": MODEL, "prompt": "one", "tools": 1}, 400),
        ("/v1/chat/completions", {"model": "no such", "messages": [{"role": "user", "content": "x"}]}, 404),
        ("/v1/completions", "no JSON", 400),
    ],
)
def test_every_call_counts_whatever_becomes_of_it(path: str, body: Any, status: int) -> None:
    with serving(TENANTS) as served:
        for _ in range(3):
            assert served.post(body, path, headers=key("a")).status_code == status
        response = served.post({"model": MODEL, "prompt": "one"}, headers=key("a"))
        assert error_of(response, 429)["code"] == "tenant_rate"
        assert 0 < int(response.headers["retry-after-ms"]) <= 20_000
        assert error_of(served.http.get("/v1/models", headers=key("a")), 429)
        assert served.post({"prompt": "one"}, "/tokenize", headers=key("b")).status_code == 200
        metrics = generate_latest(served.registry).decode()
        assert 'coppice_requests_failed_total{code="tenant_rate",model_name="org/demo",tenant="a"} 2.0' in metrics


def test_whatever_needs_a_key_is_described_with_a_limit(served: Served) -> None:
    paths = served.http.get("/openapi.json").json()["paths"]
    found = [operation["responses"] for path in paths.values() for operation in path.values()]
    assert sum("401" in responses for responses in found) == 12
    assert all(("429" in responses) == ("401" in responses) for responses in found)


def test_a_call_over_the_limit_is_refused_before_its_body() -> None:
    with serving(TENANTS) as served:
        for _ in range(3):
            served.http.get("/v1/models", headers=key("a"))
        with unfinished(served, b"{", "a") as refused:
            assert refused.recv(1024).startswith(b"HTTP/1.1 429 ")


# --- unfinished bodies --------------------------------------------------------------------------------------------


def unfinished(served: Served, body: bytes, tenant: str, *, is_whole: bool = False) -> socket.socket:
    """A connection that sent so much of a larger body."""
    headers = f"Authorization: Bearer key-{tenant}\r\n"
    return served.begin(body, length=None if is_whole else 2_000_000, headers=headers)


def small(served: Served, tenant: str) -> int:
    return served.post({"model": MODEL, "prompt": "one", "max_tokens": 1}, headers=key(tenant)).status_code


def test_unfinished_bodies_beyond_the_budget_are_refused_and_small_ones_pass() -> None:
    part = b'"' + b"x" * (SMALL_BYTES + 40_000)
    budget = BodyBudget(tenant_bytes=100_000, own_bytes=0, shared_bytes=180_000)
    with serving(TENANTS, bodies=budget) as served, ExitStack() as held:

        def hold(tenant: str) -> socket.socket:
            return held.enter_context(unfinished(served, part, tenant))

        def is_full(tenant: str, status: bytes) -> bool:
            with unfinished(served, part, tenant) as connection:
                connection.settimeout(1.0)
                try:
                    answer = read_until_closed(connection)
                except TimeoutError:
                    return False  # it was taken: those before it are not all counted yet
            assert answer.startswith(b"HTTP/1.1 %s " % status)
            assert b"connection: close" in answer
            assert b"retry-after: 1" in answer
            assert b"too_many_bytes" in answer
            return True

        first = [hold("b"), hold("b")]
        wait_for(lambda: is_full("b", b"429"), "the tenant's budget to be full")
        assert small(served, "b") == 200
        hold("c"), hold("c")
        wait_for(lambda: is_full("c", b"429"), "the other tenant's budget to be full")
        wait_for(lambda: is_full("d", b"503"), "the door's to be full")
        for tenant in "bcd":
            assert small(served, tenant) == 200
        for connection in first:
            connection.close()
        whole = json.dumps({"prompt": "y" * (SMALL_BYTES + 40_000)})
        wait_for(lambda: served.post(whole, "/tokenize", headers=key("b")).status_code == 400, "room for it again")


def test_nothing_of_a_body_is_read_for_who_has_no_key() -> None:
    with serving(TENANTS) as served, unfinished(served, b"", "nobody") as connection:
        assert connection.recv(1024).startswith(b"HTTP/1.1 401 ")
