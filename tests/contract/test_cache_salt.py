"""`cache_salt` over REST and gRPC: what reaches the engine is a digest of the tenant's own; nothing else shows it."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import generate_latest

from coppice.namespaces import SALT_BYTES, digest_salt
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.frontend.generation_spec import MAX_CACHE_SALT
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api import grpc_served
from tests.fakes.api.rest import MODEL, Served, error_of, serving

__all__ = ["served", "shared_server"]

WRONG = [
    ("", "cache_salt has 0 characters; it must have 1 to 256"),
    ("x" * (MAX_CACHE_SALT + 1), "cache_salt has 257 characters"),
]
TENANTS = TenantDirectory(
    [Tenant(id=name, api_key_sha256=(digest_of_key(f"key-{name}"),)) for name in ("a", "b")],
)


def salts(served: Served) -> list[bytes]:
    return [request.salt for request in served.engine.requests]


@pytest.mark.parametrize("streams", [True, False])
def test_a_salt_reaches_the_engine_as_a_digest(served: Served, streams: bool) -> None:
    for fields in ({"cache_salt": "user 1"}, {"cache_salt": "user 2"}, {"cache_salt": None}, {}):
        assert served.complete(stream=streams, **fields).status_code == 200
        assert served.chat(stream=streams, **fields).status_code == 200
    first, _, second, _, *without = salts(served)
    domain = served.engine.requests[0].domain
    assert (first, second) == (digest_salt(domain, "user 1"), digest_salt(domain, "user 2"))
    assert salts(served)[1::2] == salts(served)[::2], "chats and completions of one user share prefixes"
    assert without == [b""] * 4, "null is the same as leaving it out"


def test_all_prompts_and_choices_of_a_call_have_its_salt(served: Served) -> None:
    assert served.complete(prompt=["one", "two"], n=2, temperature=0, cache_salt="s").status_code == 200
    assert len(salts(served)) == 4
    assert set(salts(served)) == {digest_salt(served.engine.requests[0].domain, "s")}


def test_the_longest_salt_is_taken(served: Served) -> None:
    for text in ("ü" * MAX_CACHE_SALT, "\0"):
        assert served.complete(cache_salt=text).status_code == 200
    assert {len(salt) for salt in salts(served)} == {SALT_BYTES}


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_an_empty_salt_and_a_long_one_are_refused(served: Served, text: str, words: str) -> None:
    for answer in (served.complete(cache_salt=text), served.chat(cache_salt=text)):
        error = error_of(answer, 400)
        assert words in error["message"]
        assert error["param"] == "cache_salt"
    assert served.engine.requests == []


def test_a_salt_is_a_text(served: Served) -> None:
    assert "cache_salt must be a string" in error_of(served.complete(cache_salt=5), 400)["message"]


def test_one_salt_of_two_tenants_is_two() -> None:
    with serving(TENANTS) as served:
        for tenant in ("a", "b"):
            headers = {"authorization": f"Bearer key-{tenant}"}
            body = {"model": MODEL, "prompt": "one", "cache_salt": "user 1"}
            assert served.post(body, headers=headers).status_code == 200
        assert len(set(salts(served))) == 2


def test_no_log_no_metric_and_no_answer_shows_a_salt(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    answer = served.complete(cache_salt="very-private-name")
    refused = served.complete(cache_salt="very-private-name" * 20)
    digest = digest_salt(served.engine.requests[0].domain, "very-private-name").hex()
    seen = answer.text + refused.text + caplog.text + generate_latest(served.registry).decode()
    assert "very-private-name" not in seen
    assert digest not in seen


def test_the_same_over_grpc() -> None:
    async def test(served: grpc_served.Served) -> None:
        await served.ask(cache_salt="user 1")
        await served.ask()
        first, second = served.engine.requests
        assert (first.salt, second.salt) == (digest_salt(first.domain, "user 1"), b"")
        for text, words in WRONG:
            error = await served.refusal(cache_salt=text)
            assert error.code().name == "INVALID_ARGUMENT"
            assert words in (error.details() or "")
        assert len(served.engine.requests) == 2

    grpc_served.serve(test)
