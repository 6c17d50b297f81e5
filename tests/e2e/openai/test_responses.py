"""Responses on the whole stack: an agent sends its conversation again in each turn, and what came before is cached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.anthropic.test_agent_session import write_checkpoint
from tests.e2e.stack import Stack
from tests.fakes.api.responses_agent import CALL, Agent, function, items_of, message, output

TURNS = 6
READ: dict[str, Any] = {
    "type": "function",
    "name": "read",
    "description": "Reads a file of the project.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string", "pattern": "^[a-z]{1,6}$"}},
        "required": ["path"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("responses"))


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_agent_goes_on_and_finds_what_came_before(client: openai.OpenAI, stack: Stack) -> None:
    items: list[Any] = [{"role": "user", "content": "Mend the test. " * 8}]
    before = 0  # tokens of the last prompt and of its answer, which is a part of the next
    for turn in range(TURNS):
        options: Any = {
            "model": "tiny",
            "instructions": "You help with code. Read before you write.",
            "input": items,
            "tools": [READ],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_output_tokens": 200,
            "temperature": 1.2,
            "extra_body": {"seed": turn},
        }
        with client.responses.stream(**options) as events:
            assert [event.type for event in events][-1] == "response.completed"
            response = events.get_final_response()
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens >= 0.9 * before, f"turn {turn}"
        before = response.usage.total_tokens
        (call,) = response.output
        assert call.type == "function_call"
        assert json.loads(call.arguments).keys() == {"path"}
        items += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": f"line {turn}"}]
    assert before > 300
    stack.wait_at_rest()


# Short, whatever a model without sense chooses.
SHORT = {"type": "string", "pattern": "^[a-z]{1,6}$"}
TOOLS = [
    function("shell", "Runs a command.", ["command"], command={"type": "array", "items": SHORT, "maxItems": 3}),
    function("update_plan", "Keeps the plan.", ["step"], step=SHORT),
]
VERDICT = {"type": "object", "properties": {"mended": SHORT}, "required": ["mended"], "additionalProperties": False}
VERDICT_FORM = {"type": "json_schema", "name": "output_schema", "strict": True, "schema": VERDICT}
# A session that began elsewhere.
BEGUN: list[Any] = [
    message("developer", "The sandbox lets you write here."),
    message("user", "<environment_context><cwd>/src/app</cwd></environment_context>"),
    message("user", "Mend the test."),
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look first."}], "encrypted_content": None},
    {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_0"},
    output("call_0", "test_a.py"),
]


def test_a_coding_agent_may_call_or_answer_in_each_turn(stack: Stack) -> None:
    def post(body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        return httpx.post(f"{stack.url}/v1/responses", json=body, headers=headers, timeout=60)

    more = {"text": {"format": VERDICT_FORM, "verbosity": "low"}}
    agent = Agent(post, "tiny", BEGUN, TOOLS, {"encrypted_content": None}, more=more)
    before = 0  # tokens of the last prompt and of its answer, which is a part of the next
    for turn in range(TURNS):
        events = agent.turn()
        usage = events[-1]["response"]["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] >= 0.9 * before, f"turn {turn}"
        assert usage["input_tokens"] > before
        before = usage["total_tokens"]
        (item,) = items_of(events)
        if item["type"] == CALL:
            assert json.loads(item["arguments"]).keys() <= {"command", "step"}
            agent.items.append(output(item["call_id"], f"line {turn}"))
        else:
            assert json.loads(item["content"][0]["text"]).keys() == {"mended"}
            agent.items.append(message("user", f"And test {turn}?"))
    assert before > 500
    stack.wait_at_rest()
