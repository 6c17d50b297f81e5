"""What no client of ours would send, over a real socket: each is refused by name, and nothing reaches the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from coppice_scheduler.edge.anthropic.fields import COUNT, MESSAGES
from coppice_scheduler.edge.http.field_table import FieldTable
from coppice_scheduler.edge.openai.parsing.fields import CHAT, COMPLETION
from coppice_scheduler.edge.openai.responses.fields import RESPONSES
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.rest import CONTEXT, MODEL, Served, error_of

__all__ = ["served", "shared_server"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temprature": 1}, ["temprature", "did you mean temperature?"]),
        ({"logprobs": 21}, ["logprobs is 21", "0 to 20"]),
        ({"logprobs": -1}, ["logprobs is -1"]),
        ({"logprobs": True}, ["logprobs must be an integer, not a boolean"]),
        ({"top_logprobs": 2}, ["top_logprobs is not supported"]),
        ({"logit_bias": {"1": 101}}, ["logit_bias is 101", "-100 to 100"]),
        ({"logit_bias": {"4096": 1}}, ["4096", "4095"]),
        ({"logit_bias": {"x": 1}}, ["logit_bias has a key that is no token id"]),
        ({"logit_bias": {"-1": 1}}, ["logit_bias has a key"]),
        ({"logit_bias": {"1": "much"}}, ["logit_bias must be"]),
        ({"logit_bias": {"1": 10**400}}, ["logit_bias"]),
        ({"logit_bias": [1]}, ["logit_bias must be"]),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, ["1025", "1024"]),
        ({"n": 129}, ["n is 129", "1 to 128"]),
        ({"n": 0}, ["n is 0"]),
        ({"n": True}, ["n must be an integer"]),
        ({"n": 8, "prompt": ["a"] * 17}, ["17 prompts with n=8", "128"]),
        ({"n": 3, "best_of": 2}, ["best_of is 2", "from n to 128"]),
        ({"echo": "yes"}, ["echo must be true or false"]),
        ({"suffix": "x"}, ["suffix"]),
        ({"presence_penalty": 2.5}, ["presence_penalty is 2.5", "-2 to 2"]),
        ({"frequency_penalty": -3}, ["frequency_penalty is -3"]),
        ({"repetition_penalty": 0}, ["repetition_penalty is 0", "above 0"]),
        ({"min_p": 1.5}, ["min_p is 1.5", "0 to 1"]),
        ({"min_tokens": 5, "max_tokens": 4}, ["min_tokens is 5"]),
        ({"min_tokens": -1}, ["min_tokens is -1"]),
        ({"priority": 2**31}, ["priority"]),
        ({"timeout": 0}, ["timeout is 0"]),
        ({"timeout": "soon"}, ["timeout must be a number"]),
        ({"prompt_cache_key": 5}, ["prompt_cache_key must be a string"]),
        ({"prompt_cache_options": {"ttl": "long"}}, ["prompt_cache_options.ttl is 'long'", '"30m"']),
        ({"prompt_cache_options": {"mode": "explicit"}}, ["prompt_cache_options.mode"]),
        ({"prompt_cache_options": {"til": "30m"}}, ["prompt_cache_options.til", "mode, ttl, reuse"]),
        ({"prompt_cache_options": {"reuse": "maybe"}}, ["prompt_cache_options.reuse is 'maybe'", '"unlikely"']),
        ({"prompt_cache_retention": "12h"}, ["prompt_cache_retention is '12h'", '"24h"']),
        ({"response_format": {"type": "yaml"}}, ["response_format.type is 'yaml'", "json_object"]),
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
        ({"max_tokens": 0}, ["max_tokens is 0", "echo"]),
        ({"max_tokens": -1, "echo": True}, ["max_tokens is -1"]),
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
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, ["include_obfuscation is not supported"]),
        ({"stream": True, "stream_options": {"include_obfuscation": ""}}, ["include_obfuscation must be true or"]),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 0}}, ["continuous_usage_stats must be"]),
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
        ({"messages": [{"role": "function", "content": "x"}]}, ["'function'", "assistant"]),
        ({"messages": [{"role": "user", "content": 5}]}, ["messages[0].content must be"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, ["image_url"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "hue": 1}]}]}, ["content[0].hue"]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "hue": None}]}]}, ["content[0].hue"]),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, ["tool_calls"]),
        ({"messages": [{"role": "user", "content": "x", "color": 1}]}, ["messages[0].color"]),
        ({"tool_choice": "required"}, ["tool_choice"]),
        ({"logprobs": 5}, ["logprobs must be true or false, not an integer"]),
        ({"top_logprobs": 2}, ["top_logprobs is only for logprobs: true"]),
        ({"logprobs": True, "top_logprobs": 21}, ["top_logprobs is 21", "0 to 20"]),
        ({"echo": True}, ["echo is not supported"]),
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
        "response_format": {"type": "text"},
        "stop": None,
        "stream_options": None,
    }
    assert served.complete(best_of=1, echo=False, suffix=None, **harmless).status_code == 200
    harmless["logprobs"] = False
    chat = served.chat(tools=[], tool_choice="none", **harmless)
    assert chat.status_code == 200
    echoed = {"role": "assistant", "content": "y", "refusal": None, "tool_calls": None, "audio": None}
    messages = [{"role": "user", "content": "x"}, echoed, {"role": "user", "content": "z", "name": "bo"}]
    assert served.chat(messages=messages).status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("tools", [{"type": "function"}], " or send []. Tools are for chats: send the conversation to"),
        ("suffix", "x", ' or send "". Write the prompt with the marks'),
        ("tool_choice", "required", ' or send "none". Tools are for chats'),
        ("chat_template", "x", ". Write the prompt with it"),
    ],
)
def test_what_may_be_sent_instead_is_said(served: Served, field: str, value: Any, instead: str) -> None:
    message = error_of(served.complete(**{field: value}), 400)["message"]
    assert message.startswith(f"{field} is not supported yet. Leave it out{instead}")


@pytest.mark.parametrize(
    ("path", "body", "table"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, CHAT),
        ("/v1/completions", {"prompt": "x"}, COMPLETION),
        ("/v1/responses", {"input": "x"}, RESPONSES),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, MESSAGES),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}, COUNT),
    ],
    ids=["chats", "completions", "responses", "messages", "counts"],
)
def test_every_refusal_says_what_to_do_instead(
    served: Served, path: str, body: dict[str, Any], table: FieldTable
) -> None:
    for name in table.refused.keys() - table.supported:
        answer = served.post({"model": MODEL, name: {"any": "thing"}, **body}, path)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].endswith(f" {table.refused[name].instead}")
    assert all(refusal.instead.endswith(".") for refusal in table.refused.values())


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


def test_a_body_that_would_blow_up_in_memory_is_refused_before_it_is_parsed(served: Served) -> None:
    bomb = b'{"prompt": [' + b"[]," * 200_000 + b"[]]}"
    assert error_of(served.post(bomb), 400)["code"] == "too_complex"


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
    refused = httpx.get(f"{served.url}/v1/completions")
    error_of(refused, 405)
    assert refused.headers["allow"] == "POST"
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/healthz", "/readyz"):
        probe = httpx.head(f"{served.url}{path}")
        assert (probe.status_code, probe.content) == (200, b"")
