"""The REST API over a real socket: the `openai` package as the client, raw httpx for what no client would send."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest

import coppice
from coppice.tenants import Tenant, TenantDirectory, digest_of_key
from coppice_scheduler.core.request import OutputError, OutputErrorCode, Refused, RefusedReason, Request
from coppice_scheduler.edge.checkpoint_text import CheckpointText, load_checkpoint_text
from coppice_scheduler.edge.engine import ModelInfo
from coppice_scheduler.edge.frontdoor import FrontDoor
from coppice_scheduler.edge.http_server import HttpLimits, uvicorn_config
from coppice_scheduler.edge.metrics import FrontDoorMetrics
from coppice_scheduler.edge.openai_http import create_app
from tests.fakes.engine import FakeEngine, Script, echo, unpack

DEMO = Path(coppice.__file__).parent / "demo_model"
MODEL = "org/demo"
CONTEXT = 512
WAIT_S = 20


@dataclass
class Served:
    url: str
    engine: FakeEngine
    checkpoint: CheckpointText
    registry: CollectorRegistry

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def ids(self, text: str) -> list[int]:
        return list(self.checkpoint.raw.encode(text).ids)

    def says(self, text: str, **fields: Any) -> None:
        self.engine.script = lambda request: Script(self.ids(text), **fields)

    def post(self, body: Any, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        content = body if isinstance(body, (bytes, str)) else json.dumps(body)
        return httpx.post(f"{self.url}{path}", content=content, timeout=WAIT_S, **options)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post({"model": MODEL, "prompt": "one", **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "one"}], **fields}
        return self.post(body, "/v1/chat/completions")


@contextmanager
def serving(tenants: TenantDirectory | None = None, **options: Any) -> Iterator[Served]:
    checkpoint = load_checkpoint_text(DEMO)
    engine = FakeEngine(ModelInfo(MODEL, CONTEXT, 1_700_000_000))
    registry = CollectorRegistry()
    frontdoor = FrontDoor(
        engine, checkpoint, tenants or TenantDirectory.single_default(), FrontDoorMetrics(registry, MODEL)
    )
    app = create_app(frontdoor, registry, body_timeout_s=options.pop("body_timeout_s", 30.0))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(app, "127.0.0.1", 0, HttpLimits(**options)))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, checkpoint, registry)
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Served]:
    with serving() as served:
        yield served


@pytest.fixture
def served(shared_server: Served) -> Served:
    engine = shared_server.engine
    engine.script, engine.ready = echo, True
    for seen in (engine.requests, engine.finished_early, engine.cancelled):
        seen.clear()
    engine.some_cancelled.clear()
    engine.some_hanging.clear()
    engine.max_running = engine.num_running
    return shared_server


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


# --- the real client ----------------------------------------------------------------------------------------------


def test_models(served: Served) -> None:
    (model,) = served.client().models.list().data
    assert (model.id, model.created, model.object) == (MODEL, 1_700_000_000, "model")
    assert served.client().models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        served.client().models.retrieve("org/other")


def test_chat(served: Served) -> None:
    served.says("Hello there, wörld!", num_cached_tokens=3)
    answer = served.client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "Hello there, wörld!",
        "stop",
    )
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert usage.prompt_tokens == len(unpack(served.engine.requests[0].tokens))
    assert usage.completion_tokens == len(served.ids("Hello there, wörld!")) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert served.checkpoint.raw.decode(unpack(served.engine.requests[0].tokens)) == "user: hi\nassistant:\n"


def test_chat_stream(served: Served) -> None:
    served.says("Grüße aus 東京 🌲!", num_cached_tokens=2)
    stream = served.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(pieces) == "Grüße aus 東京 🌲!"
    assert not any("�" in piece for piece in pieces)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 2
    assert len({chunk.id for chunk in chunks}) == 1
    assert "a\nb" in served.checkpoint.raw.decode(unpack(served.engine.requests[0].tokens))


def test_completion_and_its_stream_say_the_same(served: Served) -> None:
    client = served.client()
    whole = client.completions.create(model=MODEL, prompt="one two three", max_tokens=7)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 7
    chunks = list(client.completions.create(model=MODEL, prompt="one two three", max_tokens=7, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_several_prompts_run_at_once_and_keep_their_places(served: Served) -> None:
    prompts = ["alpha beta", "gamma", "delta epsilon zeta"]
    lengths = [len(served.ids(prompt)) for prompt in prompts]
    served.engine.script = lambda request: Script(unpack(request.tokens), tokens_per_output=2)
    whole = served.client().completions.create(model=MODEL, prompt=prompts, max_tokens=30)
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(prompts))
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(lengths)
    assert whole.usage.completion_tokens == sum(lengths) + 3
    assert served.engine.max_running == 3
    texts = ["", "", ""]
    for chunk in served.client().completions.create(model=MODEL, prompt=prompts, max_tokens=30, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == prompts


def test_prompts_as_token_ids(served: Served) -> None:
    ids = served.ids("alpha beta")
    served.client().completions.create(model=MODEL, prompt=ids, max_tokens=2)
    served.client().completions.create(model=MODEL, prompt=[ids, ids[:1]], max_tokens=2)
    assert [unpack(request.tokens) for request in served.engine.requests] == [ids, ids, ids[:1]]


def test_sampling_options_reach_the_engine(served: Served) -> None:
    served.complete(temperature=0, top_p=0.5, top_k=7, seed=-1, max_tokens=3, ignore_eos=True)
    served.complete(temperature=None, max_tokens=None)
    first, second = served.engine.requests
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.0, 0.5, 7)
    assert (first.sampling.seed, first.max_new_tokens, first.stop_token_ids) == (2**64 - 1, 3, frozenset())
    # generation_config.json of the demo model; 16 is OpenAI's default for completions.
    assert (second.sampling.temperature, second.sampling.top_p, second.max_new_tokens) == (0.7, 0.9, 16)
    assert second.stop_token_ids == {0}
    served.chat()
    served.chat(max_completion_tokens=5, stop_token_ids=[3])
    assert [request.max_new_tokens for request in served.engine.requests[2:]] == [80, 5]
    assert served.engine.requests[3].stop_token_ids == {0, 3}


def test_calls_without_a_seed_differ_and_calls_with_one_do_not(served: Served) -> None:
    for fields in ({}, {}, {"seed": 5}, {"seed": 5}):
        served.complete(**fields)
    seeds = [request.sampling.seed for request in served.engine.requests]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [5, 5]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(served: Served, stream: bool) -> None:
    served.says("The answer is 42. User: and then?", hangs=True)
    response = served.complete(stop=["zzz", "User:"], max_tokens=100, stream=stream, return_token_ids=True)
    if stream:
        events = events_of(response.text)
        assert events.pop() == "[DONE]"
        choices = [event["choices"][0] for event in events]
    else:
        choices = response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "The answer is 42. "
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "User:")
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert served.checkpoint.raw.decode(ids).endswith("User:")
    assert len(served.engine.finished_early) == 1
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == len(ids)


def test_token_ids_stand_where_vllm_puts_them(served: Served) -> None:
    served.says("a b c")
    prompt, output = served.ids("one"), served.ids("a b c")
    whole = served.complete(return_token_ids=True).json()["choices"][0]
    assert (whole["prompt_token_ids"], whole["token_ids"]) == (prompt, output)
    *events, _ = events_of(served.complete(return_token_ids=True, stream=True).text)
    choices = [event["choices"][0] for event in events]
    assert choices[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in choice for choice in choices[1:])
    assert [token for choice in choices for token in choice["token_ids"]] == output
    chat = served.chat(return_token_ids=True).json()
    assert chat["prompt_token_ids"] == unpack(served.engine.requests[-1].tokens)
    assert chat["choices"][0]["token_ids"] == output
    *events, _ = events_of(served.chat(return_token_ids=True, stream=True).text)
    assert events[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    assert [token for event in events[1:] for token in event["choices"][0]["token_ids"]] == output
    plain = served.complete().json()["choices"][0]
    assert "token_ids" not in plain
    assert "prompt_token_ids" not in plain


def test_the_stream_on_the_wire(served: Served) -> None:
    response = served.chat(stream=True, stream_options={"include_usage": True}, max_tokens=2)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"] == events_of(response.text)[0]["id"]
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert all(event["usage"] is None for event in events[:-2])
    without = events_of(served.chat(stream=True, max_tokens=2).text)
    assert not any("usage" in event for event in without[:-1])


# --- wrong input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temprature": 1}, ["temprature", "did you mean temperature?"]),
        ({"logprobs": 1}, ["logprobs is not supported yet"]),
        ({"logprobs": 0}, ["logprobs is not supported yet"]),
        ({"logit_bias": {"1": 5}}, ["logit_bias"]),
        ({"n": 2}, ["n is not supported yet", "send 1"]),
        ({"n": True}, ["n is not supported yet"]),
        ({"best_of": 3}, ["best_of"]),
        ({"echo": True}, ["echo"]),
        ({"suffix": "x"}, ["suffix"]),
        ({"presence_penalty": 0.5}, ["presence_penalty"]),
        ({"frequency_penalty": -1}, ["frequency_penalty"]),
        ({"repetition_penalty": 1.1}, ["repetition_penalty"]),
        ({"priority": -5}, ["priority"]),
        ({"cache_salt": "x"}, ["cache_salt"]),
        ({"prompt_cache_key": "x"}, ["prompt_cache_key"]),
        ({"response_format": {"type": "json_object"}}, ["response_format"]),
        ({"messages": []}, ["Unknown field 'messages'"]),
        ({"temperature": "hot"}, ["temperature must be a number, not a string"]),
        ({"temperature": True}, ["temperature must be a number"]),
        ({"temperature": 2.5}, ["2.5", "0 to 2"]),
        ({"temperature": -1}, ["temperature"]),
        ({"temperature": 10**400}, ["temperature"]),
        ({"top_p": 0}, ["top_p"]),
        ({"top_p": 1.1}, ["top_p"]),
        ({"top_k": -2}, ["top_k"]),
        ({"top_k": 1.5}, ["top_k must be an integer"]),
        ({"seed": 2**64}, ["seed"]),
        ({"max_tokens": 0}, ["max_tokens is 0"]),
        ({"max_tokens": "many"}, ["max_tokens must be an integer"]),
        ({"max_tokens": 3, "max_completion_tokens": 4}, ["differ"]),
        ({"max_tokens": CONTEXT}, [str(CONTEXT), "At most"]),
        ({"stop": ["a"] * 17}, ["17", "16"]),
        ({"stop": "x" * 257}, ["256"]),
        ({"stop": ""}, ["empty"]),
        ({"stop": [1]}, ["stop must be"]),
        ({"stop_token_ids": [10**6]}, ["stop_token_ids"]),
        ({"stream": "yes"}, ["stream must be true or false"]),
        ({"stream_options": {"include_usage": True}}, ["only for stream"]),
        ({"stream": True, "stream_options": {"usage": True}}, ["stream_options.usage"]),
        ({"user": 5}, ["user must be a string"]),
        ({"prompt": ""}, ["empty"]),
        ({"prompt": []}, ["empty"]),
        ({"prompt": [""]}, ["empty"]),
        ({"prompt": [[]]}, ["empty"]),
        ({"prompt": None}, ["prompt is required"]),
        ({"prompt": 5}, ["prompt must be a string"]),
        ({"prompt": {"a": 1}}, ["prompt must be a string"]),
        ({"prompt": ["a", 1]}, ["prompt must be"]),
        ({"prompt": [1, "a"]}, ["no integer"]),
        ({"prompt": [1, True]}, ["no integer"]),
        ({"prompt": [4096]}, ["4096", "4095"]),
        ({"prompt": [-1]}, ["-1"]),
        ({"prompt": [2**70]}, ["64 bits"]),
        ({"prompt": ["a"] * 129}, ["129", "128"]),
        ({"prompt": [5] * CONTEXT}, [f"has {CONTEXT} tokens", f"context is {CONTEXT}"]),
        ({"prompt": "word " * 600}, [f"context is {CONTEXT}", "tokens. Shorten"]),
        ({"prompt": "x" * 500_000}, ["at least", f"context is {CONTEXT}"]),
        ({"model": 5}, ["model must be a string"]),
        ({"model": None}, ["model is required"]),
    ],
)
def test_a_wrong_completion_is_refused_by_name(served: Served, fields: dict[str, Any], words: list[str]) -> None:
    error = error_of(served.complete(**fields), 400)
    for word in words:
        assert word in error["message"]
    assert error["type"] == "invalid_request_error"
    assert served.engine.requests == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, ["empty"]),
        ({"messages": None}, ["required"]),
        ({"messages": "hi"}, ["list of messages"]),
        ({"messages": ["hi"]}, ["messages[0]"]),
        ({"messages": [{"role": "user"}]}, ["messages[0].content is required"]),
        ({"messages": [{"content": "x"}]}, ["messages[0].role is required"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, ["'tool'", "assistant"]),
        ({"messages": [{"role": "user", "content": 5}]}, ["messages[0].content must be"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, ["image_url"]),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, ["tool_calls"]),
        ({"messages": [{"role": "user", "content": "x", "color": 1}]}, ["messages[0].color"]),
        ({"tools": [{"type": "function"}]}, ["tools is not supported"]),
        ({"tool_choice": "required"}, ["tool_choice"]),
        ({"logprobs": True}, ["logprobs is not supported"]),
        ({"top_logprobs": 2}, ["top_logprobs"]),
        ({"prompt": "x"}, ["Unknown field 'prompt'"]),
        ({"reasoning_effort": "low"}, ["reasoning_effort"]),
        ({"add_special_tokens": True}, ["add_special_tokens"]),
    ],
)
def test_a_wrong_chat_is_refused_by_name(served: Served, fields: dict[str, Any], words: list[str]) -> None:
    error = error_of(served.chat(**fields), 400)
    for word in words:
        assert word in error["message"]
    assert served.engine.requests == []


def test_values_that_change_nothing_are_accepted(served: Served) -> None:
    harmless = {
        "n": 1,
        "logprobs": None,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "user": "u",
        "response_format": {"type": "text"},
        "stop": None,
        "stream_options": None,
    }
    assert served.complete(best_of=1, echo=False, suffix=None, **harmless).status_code == 200
    harmless["logprobs"] = False
    chat = served.chat(tools=[], tool_choice="none", parallel_tool_calls=True, store=False, **harmless)
    assert chat.status_code == 200
    echoed = {"role": "assistant", "content": "y", "refusal": None, "tool_calls": None, "audio": None}
    messages = [{"role": "user", "content": "x"}, echoed, {"role": "user", "content": "z", "name": "bo"}]
    assert served.chat(messages=messages).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"model": NaN}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"prompt": [' + b"[]," * 200_000 + b"[]]}",
        b'{"prompt": 1' + b"0" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_a_body_that_is_no_json_object_of_ours(served: Served, body: bytes) -> None:
    error_of(served.post(body), 400)


def test_many_brackets_inside_a_text_are_just_text(served: Served) -> None:
    error = error_of(served.complete(prompt='[{"' * 60_000), 400)
    assert error["code"] == "context_length_exceeded"


def test_a_body_over_two_mebibytes_is_413(served: Served) -> None:
    limit = 2 * 1024 * 1024
    error_of(served.post(b" " * (limit + 1)), 413)

    def chunks() -> Iterator[bytes]:  # no content-length to go by
        for _ in range(33):
            yield b" " * 65536

    with httpx.Client() as client:
        response = client.post(f"{served.url}/v1/completions", content=chunks())
    error_of(response, 413)
    assert served.post(b" " * (limit - 60) + b'{"model": "org/demo", "prompt": "one"}').status_code == 200


def test_unknown_models_paths_and_methods(served: Served) -> None:
    error = error_of(served.complete(model="gpt-9"), 404)
    assert "'gpt-9'" in error["message"]
    assert MODEL in error["message"]
    assert error["code"] == "model_not_found"
    assert "/v1/embeddings" in error_of(served.post({}, "/v1/embeddings"), 404)["message"]
    error_of(httpx.get(f"{served.url}/v1/completions"), 405)


# --- refusals of the core -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (RefusedReason.QUEUE_FULL, 429),
        (RefusedReason.TENANT_CONCURRENCY, 429),
        (RefusedReason.TENANT_QUEUE, 429),
        (RefusedReason.TOO_LONG, 400),
        (RefusedReason.NEVER_FITS, 400),
        (RefusedReason.EMPTY, 400),
        (RefusedReason.DRAINING, 503),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_their_status_even_for_streams(
    served: Served, reason: RefusedReason, status: int, stream: bool
) -> None:
    served.says("", refused=Refused(reason, "no, because", 1200 if status != 400 else 0))
    response = served.complete(stream=stream)
    assert error_of(response, status)["message"] == "no, because"
    expected = ("2", "1200") if status != 400 else (None, None)
    assert (response.headers.get("retry-after"), response.headers.get("retry-after-ms")) == expected


def test_the_openai_client_sees_a_rate_limit(served: Served) -> None:
    served.says("", refused=Refused(RefusedReason.QUEUE_FULL, "full", 5))
    with pytest.raises(openai.RateLimitError, match="full"):
        served.client().completions.create(model=MODEL, prompt="x")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (OutputErrorCode.QUEUE_TIMEOUT, 429),
        (OutputErrorCode.TENANT_MAXIMUM, 429),
        (OutputErrorCode.WORKER_LOST, 503),
        (OutputErrorCode.NEVER_FITS, 400),
        (OutputErrorCode.INTERNAL, 500),
    ],
)
def test_a_failure_before_the_first_token_has_a_status(served: Served, code: OutputErrorCode, status: int) -> None:
    served.says("", error=OutputError(code, "it went wrong", 0))
    for stream in (False, True):
        response = served.complete(stream=stream)
        assert error_of(response, status)["code"] == code.value
        assert ("retry-after" in response.headers) == (status in (429, 503))


def test_a_failure_mid_stream_is_an_event_and_the_end(served: Served) -> None:
    served.says("some text", error=OutputError(OutputErrorCode.WORKER_LOST, "the worker died", 0))
    events = events_of(served.chat(stream=True).text)
    assert events[-1]["error"]["code"] == "worker_lost"
    assert events[-1]["error"]["message"] == "the worker died"
    assert "[DONE]" not in events
    with pytest.raises(openai.APIError, match="the worker died"):
        list(
            served.client().chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
            )
        )
    assert served.chat().status_code == 503


def test_one_refused_prompt_cancels_the_others(served: Served) -> None:
    def script(request: Request) -> Script:
        if unpack(request.tokens) == served.ids("bad"):
            return Script([], refused=Refused(RefusedReason.TENANT_QUEUE, "no", 10))
        return Script(served.ids("fine"), hangs=True)

    served.engine.script = script
    error_of(served.complete(prompt=["good", "bad", "good"]), 429)
    assert served.engine.num_running == 0
    assert len(served.engine.cancelled) == len(served.engine.requests) - 1


def test_not_ready_is_503(served: Served) -> None:
    served.engine.ready = False
    assert served.complete().headers["retry-after"] == "1"
    error_of(served.complete(), 503)
    assert httpx.get(f"{served.url}/readyz").status_code == 503
    assert httpx.get(f"{served.url}/healthz").status_code == 200
    served.engine.ready = True
    assert httpx.get(f"{served.url}/readyz").text == "ready\n"


# --- clients that go away, or are slow ----------------------------------------------------------------------------


def raw_request(served: Served, body: bytes, *, length: int | None = None, key: str = "") -> socket.socket:
    port = int(served.url.rsplit(":", 1)[1])
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body) if length is None else length}\r\n"
    connection.sendall(head.encode() + b"\r\n" + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels(served: Served, stream: bool) -> None:
    served.says("one two", hangs=True)
    body = json.dumps({"model": MODEL, "prompt": ["x", "y"], "stream": stream}).encode()
    connection = raw_request(served, body)
    assert served.engine.some_hanging.wait(WAIT_S)
    connection.close()
    assert served.engine.some_cancelled.wait(WAIT_S)
    served.engine.script = echo
    assert served.complete(prompt="after", max_tokens=1).status_code == 200  # the server goes on
    metrics = generate_latest(served.registry).decode()
    assert 'code="cancelled"' in metrics


def test_headers_and_bodies_must_arrive_in_time() -> None:
    with serving(header_timeout_s=0.3, body_timeout_s=0.3) as served:
        port = int(served.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHo")
            assert read_until_closed(half) == b""
        with raw_request(served, b'{"model"', length=100) as half:
            answer = read_until_closed(half)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer
        served.says("slow but sure")
        with httpx.Client() as client:  # a connection in use is not one that dawdles
            for _ in range(3):
                assert client.get(f"{served.url}/healthz").status_code == 200


def read_until_closed(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while part := connection.recv(65536):
            answer += part
    except ConnectionResetError:
        pass
    return answer


def test_a_client_that_does_not_read_is_cut_off() -> None:
    with serving(write_timeout_s=0.3, send_buffer_bytes=4096) as served:
        served.engine.script = lambda request: Script([], hangs=True)
        endless = served.ids(" forest" * 200)
        served.engine.script = lambda request: Script((endless * 100)[: request.max_new_tokens])
        body = {"model": MODEL, "prompt": ["x"] * 100, "max_tokens": 500, "stream": True, "return_token_ids": True}
        port = int(served.url.rsplit(":", 1)[1])
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        raw = json.dumps(body).encode()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
        assert served.engine.some_cancelled.wait(WAIT_S)
        connection.close()


def test_too_many_headers_and_too_many_requests() -> None:
    with serving(max_requests=1) as served:
        headers = {f"x-{number}": "1" for number in range(65)}
        assert error_of(served.post({}, headers=headers), 400)["code"] == "too_many_headers"
        served.says("", hangs=True)
        connection = raw_request(served, json.dumps({"model": MODEL, "prompt": "x"}).encode())
        assert served.engine.some_hanging.wait(WAIT_S)
        response = served.complete()
        assert error_of(response, 503)["code"] == "too_many_requests"
        assert "retry-after" in response.headers
        connection.close()
        assert served.engine.some_cancelled.wait(WAIT_S)


# --- tenants ------------------------------------------------------------------------------------------------------


def test_the_credential_decides_who_asks() -> None:
    tenants = [Tenant(id=name, api_key_sha256=(digest_of_key(f"key-{name}"),)) for name in ("a", "b")]
    with serving(TenantDirectory(tenants)) as served:
        for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic key-a"}):
            response = served.post({"model": MODEL, "prompt": "x"}, headers=headers)
            assert error_of(response, 401)["type"] == "authentication_error"
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        error_of(served.post(b"{", headers={"authorization": "Bearer nope"}), 401)
        with pytest.raises(openai.AuthenticationError):
            served.client("nope").models.list()
        for name in ("a", "b"):
            served.client(f"key-{name}").completions.create(model=MODEL, prompt="x", user="somebody else")
        assert [(request.tenant, request.domain) for request in served.engine.requests] == [
            ("a", "tenant/a"),
            ("b", "tenant/b"),
        ]
        metrics = httpx.get(f"{served.url}/metrics").text
        assert 'vllm:request_success_total{finished_reason="length",model_name="org/demo",tenant="a"} 1.0' in metrics
        assert 'vllm:prompt_tokens_total{model_name="org/demo",tenant="b"} 1.0' in metrics
        assert 'vllm:generation_tokens_total{model_name="org/demo",tenant="b"} 16.0' in metrics
        assert 'vllm:time_to_first_token_seconds_count{model_name="org/demo",tenant="a"} 1.0' in metrics
        assert 'vllm:inter_token_latency_seconds_count{model_name="org/demo",tenant="a"} 15.0' in metrics
        assert 'vllm:e2e_request_latency_seconds_count{model_name="org/demo",tenant="a"} 1.0' in metrics
