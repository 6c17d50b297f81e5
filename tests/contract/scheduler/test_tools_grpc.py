"""Tools over gRPC: what REST has, in its own messages."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from coppice_rpc.v1 import scheduler_pb2 as pb
from tests.fakes.api.engine import unpack
from tests.fakes.api.grpc_served import Served, details_of, serve

CITY = json.dumps({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
WEATHER = pb.Tool(name="get_weather", description="Tells the weather.", parameters=CITY)
NOW = pb.Tool(name="now")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TWO = f'I look.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


def chat(*messages: pb.ChatMessage, tools: tuple[pb.Tool, ...] = (WEATHER, NOW)) -> pb.ChatMessages:
    return pb.ChatMessages(messages=messages or [pb.ChatMessage(role="user", content="How is Ulm?")], tools=tools)


def gathered(answers: list[pb.GenerateResponse]) -> tuple[str, list[tuple[str, str]], str]:
    calls: list[tuple[str, str]] = []
    for piece in (piece for answer in answers for piece in answer.tool_calls):
        if piece.name:
            assert piece.id
            calls.append((piece.name, ""))
        calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.arguments)
    return "".join(answer.text for answer in answers), calls, answers[-1].finish_reason


def test_calls_come_apart_from_text() -> None:
    async def test(served: Served) -> None:
        served.says(TWO)
        both = [("get_weather", '{"city": "Ulm"}'), ("now", "{}")]
        assert gathered(await served.ask(chat=chat(), max_tokens=200)) == ("I look.", both, "tool_calls")
        one = await served.ask(chat=chat(), max_tokens=200, parallel_tool_calls=False)
        assert gathered(one) == ("I look.", both[:1], "tool_calls")
        none = await served.ask(chat=chat(), max_tokens=200, tool_choice=pb.ToolChoice(mode="none"))
        assert gathered(none) == (TWO, [], "stop")
        served.says(CALL)
        forced = pb.ToolChoice(mode="required", names=["get_weather"])
        assert gathered(await served.ask(chat=chat(), max_tokens=200, tool_choice=forced))[1] == both[:1]
        grammar = served.engine.requests[-1].sampling.grammar
        assert "get_weather" in grammar
        assert "now" not in grammar

    serve(test)


def test_the_prompt_has_tools_calls_and_results() -> None:
    async def test(served: Served) -> None:
        called = pb.ChatMessage(role="assistant")
        called.tool_calls.add(id="c1", name="get_weather", arguments='{"city":"Ulm"}')
        result = pb.ChatMessage(role="tool", content="rain", tool_call_id="c1")
        await served.ask(chat=chat(called, result))
        prompt = served.checkpoint.raw.decode(unpack(served.engine.requests[-1].tokens))
        assert f"assistant:\n{CALL}" in prompt
        assert "tool: rain\n" in prompt
        assert '"description": "Tells the weather."' in prompt

    serve(test)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"chat": chat(tools=(pb.Tool(name="a b"),))}, "tools[0].name"),
        ({"chat": chat(tools=(NOW, NOW))}, "tools[1].name"),
        ({"chat": chat(tools=(NOW,) * 129)}, "tools"),
        ({"chat": chat(tools=(pb.Tool(name="f", parameters="{"),))}, "tools[0].parameters"),
        ({"chat": chat(tools=(pb.Tool(name="f", parameters='{"type": "array"}'),))}, "tools[0].parameters"),
        ({"chat": chat(tools=(pb.Tool(name="f", parameters='{"a": NaN}'),))}, "tools[0].parameters"),
        ({"chat": chat(tools=(pb.Tool(name="f", parameters="[" * 60_000),))}, "tools"),
        ({"chat": chat(tools=(pb.Tool(name="f", parameters="[" * 40_000),))}, "tools[0].parameters"),
        ({"chat": chat(pb.ChatMessage(role="user", tool_calls=[pb.ToolCall(name="f")]))}, "messages[0].tool_calls"),
        ({"chat": chat(pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()]))}, "tool_calls[0].name"),
        (
            {"chat": chat(pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f")] * 1025))},
            "tool_calls",
        ),
        ({"chat": chat(), "tool_choice": pb.ToolChoice(mode="always")}, "tool_choice"),
        ({"chat": chat(), "tool_choice": pb.ToolChoice(names=["nobody"])}, "tool_choice"),
        ({"chat": chat(tools=()), "tool_choice": pb.ToolChoice(mode="required")}, "tool_choice"),
        ({"text": "x", "tool_choice": pb.ToolChoice(mode="required")}, "tool_choice"),
        ({"chat": chat(), "regex": "a"}, "tools"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str) -> None:
    async def test(served: Served) -> None:
        error = await served.refusal(**fields)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(error)["BadRequest"].field_violations[0].field == field
        assert served.engine.requests == []

    serve(test)
