"""A coding agent's session over `/v1/messages` on the whole stack, with what such agents put into each request.

Their documentation says what that is: a system prompt of several blocks, the first of which differs with each call;
breakpoints for a cache; tools; switches for thinking and effort; beta fields; the whole conversation in each turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.e2e.openai.test_tool_calls import TEMPLATE
from tests.e2e.stack import Stack
from tests.fakes.checkpoints import write_tiny_checkpoint

TURNS = 10
NAME: dict[str, Any] = {"type": "string", "pattern": "^[a-z]{1,6}$"}
CACHED: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
TOOLS: list[Any] = [
    {
        "name": "Read",
        "description": "Reads a file of the project.",
        "input_schema": {
            "type": "object",
            "properties": {"file_path": NAME, "limit": {"type": "integer", "minimum": 1, "maximum": 99}},
            "required": ["file_path", "limit"],
            "additionalProperties": False,
        },
    },
    {
        "name": "Bash",
        "description": "Runs a command.",
        "input_schema": {
            "type": "object",
            "properties": {"command": NAME},
            "required": ["command"],
            "additionalProperties": False,
        },
        **CACHED,
    },
]


def write_checkpoint(folder: Path) -> Path:
    """A model without sense, which calls tools in the form that it must."""
    path = write_tiny_checkpoint(folder, "qwen2", seed=6)
    (path / "chat_template.jinja").write_text(TEMPLATE.replace("in tools %", "in tools or [] %"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0) as client:
        yield client


def request_of(turn: int, messages: list[Any]) -> dict[str, Any]:
    billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turn:05};"}
    system = [billing, {"type": "text", "text": "You help with code. Read before you write.", **CACHED}]
    return {
        "model": "tiny",
        "max_tokens": 300,
        "system": system,
        "messages": messages,
        "tools": TOOLS,
        "metadata": {"user_id": "user_1_session_2"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
    }


BETA: dict[str, Any] = {
    "betas": ["context-management-2025-06-27"],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}


def test_a_session_of_ten_turns_finds_what_came_before(client: anthropic.Anthropic, stack: Stack) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Mend the test.", **CACHED}]}]
    before = 0  # tokens of the last prompt and of its answer, which is a part of the next
    for turn in range(TURNS):
        extra = {"temperature": 1.2, "seed": turn, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        body = request_of(turn, messages)
        with client.beta.messages.stream(**body, **BETA, extra_body=extra) as events:
            kinds = [event.type for event in events]
            answer = events.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        usage = answer.usage
        cached = usage.cache_read_input_tokens or 0
        assert cached >= 0.9 * before, f"turn {turn}"
        before = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0) + usage.output_tokens
        assert answer.stop_reason == "tool_use"
        (call,) = answer.content
        assert call.type == "tool_use"
        properties = next(tool for tool in TOOLS if tool["name"] == call.name)["input_schema"]["properties"]
        assert call.input.keys() == properties.keys()
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"line {turn}", "is_error": turn == 3}
        messages += [
            {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
            {"role": "user", "content": [result]},
        ]
    assert before > 700
    stack.wait_at_rest()


def test_what_is_counted_is_what_is_computed(client: anthropic.Anthropic, stack: Stack) -> None:
    body = request_of(0, [{"role": "user", "content": "Which test fails?"}])
    counted = {name: body[name] for name in ("model", "system", "messages", "tools")}
    num_tokens = client.messages.count_tokens(**counted).input_tokens
    usage = client.messages.create(**body).usage
    cached, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    assert usage.input_tokens + cached + written == num_tokens
    again = client.messages.create(**body).usage
    assert (again.cache_read_input_tokens or 0) >= 0.9 * num_tokens
    stack.wait_at_rest()


def test_one_prefix_for_both_apis(client: anthropic.Anthropic, stack: Stack) -> None:
    """What came by the one is found by the other."""
    text = "The same words, by whichever way they came. " * 8
    client.messages.create(model="tiny", max_tokens=4, messages=[{"role": "user", "content": text}])
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    usage = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0.9 * usage["prompt_tokens"]
    stack.wait_at_rest()
