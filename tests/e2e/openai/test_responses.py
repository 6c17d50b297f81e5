"""Responses on the whole stack: an agent sends its conversation again in each turn, and what came before is cached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.anthropic.test_agent_session import write_checkpoint
from tests.e2e.stack import Stack

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
