"""What the tenants file narrows for one tenant: models, context, retention, counts of cached tokens. Over REST."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import ApiKey, digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.frontend.frontdoor import DEFAULT_MAX_RETAIN_MS
from tests.fakes.api.rest import CONTEXT, MODEL, WAIT_S, Served, serving

USER = [{"role": "user", "content": "one"}]
GENERATE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "one"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
}
OTHERS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "one"},
    "/detokenize": {"tokens": [1]},
    "/v1/messages/count_tokens": {"messages": USER},
}
LIMIT = 40  # tokens
LONG = "one two three " * LIMIT
TOO_LONG: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9},
}
COUNTS = ("cached_tokens", "cache_write_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
MINUTE_MS = 60_000
KEPT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt_cache_options": {"ttl": "20m"}},
    "/v1/chat/completions": {"prompt_cache_retention": "24h"},
    "/v1/responses": {"prompt_cache_retention": "24h"},
    "/v1/messages": {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
}


def directory(**fields: Any) -> TenantDirectory:
    """Tenant a has these fields, tenant b none."""
    given: dict[str, dict[str, Any]] = {"a": fields, "b": {}}
    return TenantDirectory(
        [
            Tenant(id=name, api_key_sha256=(ApiKey(sha256=digest_of_key(f"key-{name}")),), **given[name])
            for name in given
        ]
    )


@contextmanager
def serving_with(**fields: Any) -> Iterator[Served]:
    with serving(directory(**fields)) as served:
        yield served


def ask(served: Served, path: str, tenant: str = "a", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, **{**GENERATE, **OTHERS}[path], **fields}
    body = {name: value for name, value in body.items() if value is not None}
    return served.post(body, path, headers={"authorization": f"Bearer key-{tenant}"})


def get(served: Served, path: str, tenant: str = "a") -> httpx.Response:
    return served.http.get(path, headers={"authorization": f"Bearer key-{tenant}"})


def told(response: httpx.Response) -> tuple[int, dict[str, Any]]:
    """Status and error, but for the id of the request."""
    return response.status_code, response.json()["error"]


def context_refusal(response: httpx.Response) -> str:
    status, error = told(response)
    assert status == 400, response.text
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded", "Anthropic's errors have no code"
    return str(error["message"])


# --- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*GENERATE, *OTHERS])
def test_a_model_that_is_not_for_a_tenant_does_not_exist_for_it(path: str) -> None:
    with serving_with(models=("org/other",)) as served:
        status, error = told(ask(served, path))
        unknown_status, unknown = told(ask(served, path, model="no/such"))
        assert (status, error["message"]) == (404, unknown["message"].replace("no/such", MODEL))
        assert (status, {**error, "message": ""}) == (unknown_status, {**unknown, "message": ""})
        assert error["message"] == f"The model {MODEL!r} does not exist; this server has none for this tenant."
        assert served.engine.requests == []
        assert told(ask(served, path, "b", model="no/such"))[0] == 404
        assert ask(served, path, "b").status_code == 200


@pytest.mark.parametrize("path", [*GENERATE, *OTHERS])
def test_a_tenant_asks_for_the_models_that_are_named_for_it(path: str) -> None:
    with serving_with(models=("org/other", MODEL)) as served:
        assert ask(served, path).status_code == 200
        status, error = told(ask(served, path, model="org/other"))
        assert (status, repr(MODEL) in error["message"]) == (404, True), "it is named, and not served here"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_model_is_not_had_without_its_name_either(path: str) -> None:
    with serving_with(models=("org/other",)) as served:
        status, error = told(ask(served, path, model=None))
        assert (status, error["code"]) == (404, "model_not_found")
        assert ask(served, path, "b", model=None).status_code == 200


def test_the_list_has_the_models_that_are_for_the_tenant() -> None:
    with serving_with(models=("org/other",)) as served:
        assert get(served, "/v1/models").json() == {"object": "list", "data": []}
        assert told(get(served, f"/v1/models/{MODEL}"))[0] == 404
        assert [model["id"] for model in get(served, "/v1/models", "b").json()["data"]] == [MODEL]
        assert get(served, f"/v1/models/{MODEL}", "b").json()["id"] == MODEL


# --- context ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TOO_LONG)
def test_a_prompt_beyond_a_tenants_context_is_refused_with_its_number(path: str) -> None:
    with serving_with(max_context=LIMIT) as served:
        message = context_refusal(ask(served, path, **TOO_LONG[path]))
        assert f"This tenant's context is {LIMIT} tokens and must hold at least one new one" in message
        assert served.engine.requests == []
        assert ask(served, path, "b", **TOO_LONG[path]).status_code == 200


@pytest.mark.parametrize("num_tokens", [LIMIT, CONTEXT])
def test_so_is_a_list_of_tokens(num_tokens: int) -> None:
    with serving_with(max_context=LIMIT) as served:
        message = context_refusal(ask(served, "/v1/completions", prompt=[5] * num_tokens))
        assert f"This tenant's context is {LIMIT} tokens" in message
        assert f"has {num_tokens} tokens" in message
        assert ask(served, "/v1/completions", prompt=[5] * (LIMIT - 1), max_tokens=1).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_more_new_tokens_than_a_tenants_context_has_room_for_are_refused(path: str) -> None:
    with serving_with(max_context=LIMIT) as served:
        message = context_refusal(ask(served, path, max_tokens=LIMIT))
        assert message.startswith(f"This tenant's context is {LIMIT} tokens; ")
        room = int(message.split("At most ")[1].split(" ")[0])
        assert served.engine.requests == []
        assert ask(served, path, max_tokens=room).status_code == 200
        assert ask(served, path, max_tokens=room + 1).status_code == 400
        assert ask(served, path, "b", max_tokens=LIMIT).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_where_no_maximum_is_asked_for_an_answer_ends_with_the_tenants_context(path: str) -> None:
    body: dict[str, Any] = {"prompt": [5] * (LIMIT - 9)} if path == "/v1/completions" else {}
    with serving_with(max_context=LIMIT) as served:
        assert ask(served, path, **body).status_code == 200
        (request,) = served.engine.requests
        assert len(request.tokens) // 4 + request.max_new_tokens == LIMIT


def test_an_answer_that_a_tenants_context_cuts_says_so() -> None:
    with serving_with(max_context=LIMIT) as served:
        answer = ask(served, "/v1/messages", max_tokens=CONTEXT)
        assert answer.json()["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize(("asked", "counts"), [(LIMIT, LIMIT), (CONTEXT, CONTEXT), (CONTEXT * 8, CONTEXT)])
def test_a_tenant_is_told_its_context_and_the_services_caps_it(asked: int, counts: int) -> None:
    with serving_with(max_context=asked) as served:
        assert get(served, "/v1/models").json()["data"][0]["max_model_len"] == counts
        assert get(served, f"/v1/models/{MODEL}").json()["max_model_len"] == counts
        assert ask(served, "/tokenize").json()["max_model_len"] == counts
        assert get(served, "/v1/models", "b").json()["data"][0]["max_model_len"] == CONTEXT
        whose = "tenant" if counts < CONTEXT else "model"
        assert f"This {whose}'s context is {counts} " in context_refusal(
            ask(served, "/v1/completions", prompt=[5] * CONTEXT)
        )


# --- retention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize(
    ("most", "kept"), [(0, 0), (MINUTE_MS, MINUTE_MS), (100 * DEFAULT_MAX_RETAIN_MS, None), (None, None)]
)
def test_a_tenant_keeps_prompts_as_long_as_it_may(path: str, most: int | None, kept: int | None) -> None:
    """None: as long as those without a limit of their own."""
    with serving_with(max_retain_ms=most) as served:
        for tenant in "ab":
            assert ask(served, path, tenant, **KEPT[path]).status_code == 200
        own, others = (request.retain_ms for request in served.engine.requests)
        assert 0 < others <= DEFAULT_MAX_RETAIN_MS
        assert own == (others if kept is None else kept)


# --- cached tokens ------------------------------------------------------------------------------------------------


def counts_of(told: Any) -> list[int]:
    """Of all usages within it."""
    if isinstance(told, list):
        return [count for one in told for count in counts_of(one)]
    if not isinstance(told, dict):
        return []
    own = [value for name, value in told.items() if name in COUNTS]
    return own + [count for value in told.values() for count in counts_of(value)]


def bodies_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines or [text]]


STREAMED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"stream_options": {"include_usage": True}},
    "/v1/chat/completions": {"stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize("streams", [False, True])
def test_usage_tells_nothing_of_the_cache_where_the_file_says_so(path: str, streams: bool) -> None:
    fields = {"stream": True, **STREAMED.get(path, {})} if streams else {}
    with serving_with(shows_cached_tokens=False) as served:
        found: dict[str, list[list[int]]] = {"a": [], "b": []}
        totals = []
        for num_cached, num_written in ((0, 2), (2, 0)):
            served.says("Fine.", num_cached_tokens=num_cached, num_written_tokens=num_written)
            for tenant, seen in found.items():
                answer = ask(served, path, tenant, **fields)
                assert answer.status_code == 200
                seen.append(counts_of(bodies_of(answer.text)))
                totals.append(totals_of(bodies_of(answer.text)[-1 if path != "/v1/messages" or not streams else -2]))
        assert found["a"][0] == found["a"][1], "a prompt that was found looks like one that was not"
        assert set(found["a"][0]) == {0}
        assert found["b"][0] != found["b"][1]
        assert len({*totals}) == 1, "what was used is told in full"


def totals_of(body: dict[str, Any]) -> tuple[int, int]:
    """(prompt, output) of the usage at the end, everything counted."""
    usage = body.get("usage") or body["response"]["usage"]
    cached = sum(usage.get(name, 0) for name in COUNTS)
    prompt = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"] + cached
    return prompt, usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"best_of": 3, "n": 2}, {"prompt": ["one", "two"]}, {"n": 2, "use_beam_search": True}],
    ids=["choices", "the best", "prompts", "beams"],
)
def test_so_do_calls_of_many_answers(fields: dict[str, Any]) -> None:
    with serving_with(shows_cached_tokens=False) as served:
        served.says("Fine.", num_cached_tokens=3, num_written_tokens=2)
        asked = {"temperature": 0} if "use_beam_search" in fields else {}
        answers = {tenant: ask(served, "/v1/completions", tenant, **fields, **asked) for tenant in "ab"}
        assert {answer.status_code for answer in answers.values()} == {200}
        assert set(counts_of(answers["a"].json())) == {0}
        assert max(counts_of(answers["b"].json())) > 0


# --- while it runs ------------------------------------------------------------------------------------------------


def test_all_of_it_changes_while_the_service_runs() -> None:
    with serving_with() as served:
        served.says("Fine.", num_cached_tokens=3)
        kept = KEPT["/v1/completions"]

        def seen() -> tuple[int, int, int, set[int]]:
            """(models, context, time that a prompt is kept, counts)"""
            models = get(served, "/v1/models").json()["data"]
            answer = ask(served, "/v1/completions", **kept)
            context = models[0]["max_model_len"] if models else 0
            return len(models), context, served.engine.requests[-1].retain_ms, set(counts_of(answer.json()))

        before = seen()
        assert before == (1, CONTEXT, 20 * MINUTE_MS, {0, 3})
        served.set_tenants(directory(max_context=LIMIT, max_retain_ms=0, shows_cached_tokens=False))
        assert seen() == (1, LIMIT, 0, {0})
        served.set_tenants(directory(models=("org/other",)))
        assert get(served, "/v1/models").json()["data"] == []
        assert ask(served, "/v1/completions").status_code == 404
        served.set_tenants(directory())
        assert seen() == before


def test_an_answer_that_began_goes_on_as_it_began() -> None:
    with serving_with() as served:
        served.says("Fine.", num_cached_tokens=3, hangs=True)
        headers = {"authorization": "Bearer key-a"}
        body = {"model": MODEL, "prompt": "one", "stream": True, "stream_options": {"include_usage": True}}
        with served.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            assert served.engine.some_hanging.wait(WAIT_S)
            served.set_tenants(directory(models=("org/other",), max_context=2, shows_cached_tokens=False))
            (request_id,) = served.engine.running
            assert served.engine.loop is not None
            served.engine.loop.call_soon_threadsafe(served.engine.let_go, request_id)
            text = "\n".join(answer.iter_lines())
        assert "data: [DONE]" in text
        assert 3 in counts_of(bodies_of(text))
