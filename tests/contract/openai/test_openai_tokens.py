"""`/tokenize` and `/detokenize` in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import digest_of_key
from coppice.tenants.tenant import Tenant
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.engine import unpack
from tests.fakes.api.rest import CONTEXT, MODEL, Served, error_of, serving

__all__ = ["served", "shared_server"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text_and_back(served: Served, prefix: str) -> None:
    ids = served.ids("Grüße 🌲")
    answer = served.post({"model": MODEL, "prompt": "Grüße 🌲", "return_token_strs": True}, f"{prefix}/tokenize").json()
    names = [served.checkpoint.raw.id_to_token(token_id) for token_id in ids]
    assert answer == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": names}
    assert served.post({"tokens": ids}, f"{prefix}/detokenize").json() == {"prompt": "Grüße 🌲"}
    assert served.post({"tokens": [0, *ids]}, f"{prefix}/detokenize").json() == {"prompt": "<|endoftext|>Grüße 🌲"}


def test_a_chat_is_tokenised_as_it_would_run(served: Served) -> None:
    messages = [{"role": "user", "content": "one"}]
    answer = served.post({"messages": messages, "add_generation_prompt": True}, "/tokenize").json()
    served.chat(messages=messages)
    assert answer["tokens"] == unpack(served.engine.requests[0].tokens)
    assert answer["token_strs"] is None


def test_a_chat_may_end_behind_or_within_its_last_message(served: Served) -> None:
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "It is"}]

    def told(**fields: Any) -> str:
        served.engine.requests.clear()
        answer = served.chat(messages=messages, **fields)
        assert answer.status_code == 200
        assert "x-coppice-ignored-fields" not in answer.headers
        tokens = unpack(served.engine.requests[0].tokens)
        assert served.post({"messages": messages, **fields}, "/tokenize").json()["tokens"] == tokens
        text: str = served.post({"tokens": tokens}, "/detokenize").json()["prompt"]
        return text

    whole, behind = told(), told(add_generation_prompt=False)
    within = told(add_generation_prompt=False, continue_final_message=True)
    assert within.endswith("It is")
    assert behind.startswith(within)
    assert whole.startswith(behind)
    assert len(within) < len(behind) < len(whole)
    assert told(continue_final_message=True) == within


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
        },
    ],
)
def test_a_form_is_that_of_a_whole_answer(served: Served, fields: dict[str, Any]) -> None:
    messages = [{"role": "assistant", "content": "It is"}]
    refused = served.chat(messages=messages, continue_final_message=True, **fields)
    assert "goes on from a message" in error_of(refused, 400)["message"]
    assert served.chat(messages=messages, **fields).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": []}, "either prompt or messages"),
        ("/tokenize", {"messages": []}, "messages is empty"),
        (
            "/tokenize",
            {
                "messages": [{"role": "user", "content": "x"}],
                "add_generation_prompt": True,
                "continue_final_message": True,
            },
            "add_generation_prompt cannot be true",
        ),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt is only for messages"),
        ("/tokenize", {"prompt": "x", "continue_final_message": True}, "continue_final_message is only for messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}, "special tokens"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": "yes"}, "add_generation_prompt must be true or false"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens must be true or false"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "return_token_strs": 1}, "true or false"),
        ("/tokenize", {"promt": "x"}, "did you mean prompt?"),
        ("/tokenize", {"prompt": "x" * 500_000}, "context is"),
        ("/detokenize", {}, "tokens must be a list"),
        ("/detokenize", {"tokens": [1.5]}, "no integer"),
        ("/detokenize", {"tokens": [4096]}, "4095"),
        ("/detokenize", {"tokens": [-1]}, "-1"),
    ],
)
def test_what_is_wrong_is_said(served: Served, path: str, body: dict[str, Any], words: str) -> None:
    assert words in error_of(served.post(body, path), 400)["message"]


def test_they_need_a_key_and_the_right_model(served: Served) -> None:
    error_of(served.post({"model": "gpt-9", "prompt": "x"}, "/tokenize"), 404)
    with serving(TenantDirectory([Tenant(id="a", api_key_sha256=(digest_of_key("key-a"),))])) as locked:
        for path in ("/tokenize", "/detokenize"):
            error_of(locked.post({}, path), 401)
