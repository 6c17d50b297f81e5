"""Tools on the whole stack: a model without sense calls what it must, in the form that it must."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.e2e.stack import Stack
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.oracle import Oracle

pytestmark = pytest.mark.wide

TEMPLATE = (
    "{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    "{% if tools %}Write <tool_call>...</tool_call>\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}{% endfor %}<|assistant|>"
)
TURNS = 10


class City(BaseModel):
    """Tells the weather of a city."""

    model_config = ConfigDict(extra="forbid", title="City")
    name: Annotated[str, Field(max_length=6, pattern="^[A-Z][a-z]+$")]
    day: Literal["today", "tomorrow"]


class Now(BaseModel):
    """Tells the time."""

    model_config = ConfigDict(extra="forbid", title="Now")


TOOLS: list[Any] = [openai.pydantic_function_tool(City), openai.pydantic_function_tool(Now)]
KINDS: dict[str, type[BaseModel]] = {"City": City, "Now": Now}
OPTIONS: dict[str, Any] = {"model": "tiny", "max_tokens": 900, "temperature": 1.2, "seed": 3, "tools": TOOLS}
USER: dict[str, Any] = {"role": "user", "content": "How is it?"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("tools"), "qwen2", seed=6)
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def checked(calls: Any) -> list[Any]:
    assert calls
    for call in calls:
        KINDS[call.function.name].model_validate_json(call.function.arguments)
    return list(calls)


@pytest.mark.parametrize("stream", [pytest.param(True, marks=pytest.mark.wide), False])
def test_required_calls_cannot_fail_to_parse(client: openai.OpenAI, stream: bool) -> None:
    for seed in range(6):
        options: Any = {**OPTIONS, "seed": seed, "messages": [USER], "tool_choice": "required"}
        if stream:
            with client.chat.completions.stream(**options) as events:
                (choice,) = events.get_final_completion().choices
        else:
            (choice,) = client.chat.completions.create(**options).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content in ("", None)
        checked(choice.message.tool_calls)


def test_a_named_tool_is_called_once(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "City"}}
    answer = client.chat.completions.parse(messages=[USER], tool_choice=named, n=3, **OPTIONS)
    for choice in answer.choices:
        (call,) = checked(choice.message.tool_calls)
        assert isinstance(call.function.parsed_arguments, City)


def test_an_agent_goes_on_with_what_it_called_and_finds_it_cached(client: openai.OpenAI, stack: Stack) -> None:
    messages: list[Any] = [USER]
    before = 0  # tokens of the last prompt and of its answer, which is a part of the next
    for turn in range(TURNS):
        named: Any = {"type": "function", "function": {"name": "City"}}
        answer = client.chat.completions.create(messages=messages, tool_choice=named, **{**OPTIONS, "seed": turn})
        usage = answer.usage
        assert usage is not None
        details = usage.prompt_tokens_details
        assert details is not None
        assert (details.cached_tokens or 0) >= 0.9 * before, f"turn {turn}"
        (call,) = checked(answer.choices[0].message.tool_calls)
        messages += [
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": f"rain {turn}"},
        ]
        before = usage.total_tokens
    assert before > 900
    stack.wait_at_rest()


def test_text_and_calls_side_by_side(stack: Stack, oracle: Oracle) -> None:
    """Those without tools get the tokens of `transformers`."""
    prompt = list(b"some words that are continued")

    async def all_at_once() -> tuple[list[Any], list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
            extra = {"return_token_ids": True, "ignore_eos": True}
            options: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0, "extra_body": extra}
            free = [client.completions.create(**options) for _ in range(4)]
            forced: Any = {**OPTIONS, "messages": [USER], "tool_choice": "required"}
            calling = [client.chat.completions.create(**{**forced, "seed": seed}) for seed in range(4)]
            return await asyncio.gather(*free), await asyncio.gather(*calling)

    free, calling = asyncio.run(all_at_once())
    for answer in free:
        oracle.check(prompt, answer.choices[0].token_ids)
    for answer in calling:
        checked(answer.choices[0].message.tool_calls)
    stack.wait_at_rest()


def test_strict_tools_leave_text_free(client: openai.OpenAI) -> None:
    """A model without sense seldom calls; what it says has no marker that is no call."""
    assert all(tool["function"]["strict"] for tool in TOOLS)
    options: Any = {**OPTIONS, "max_tokens": 60, "messages": [USER], "logit_bias": {str(ord("<")): 5}}
    answer = client.chat.completions.create(n=4, **options)
    for choice in answer.choices:
        assert choice.finish_reason in ("stop", "length", "tool_calls")
        assert "<tool_call>" not in (choice.message.content or "")


def test_langchain_structures_output_by_a_call(stack: Stack) -> None:
    module = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    options: Any = {"max_retries": 0, "max_tokens": 900, "seed": 3, "temperature": 1.2}
    chat = module.ChatOpenAI(model="tiny", base_url=f"{stack.url}/v1", api_key="none", **options)
    found = chat.with_structured_output(City, method="function_calling").invoke("How is it?")
    assert isinstance(found, City)
    (call,) = chat.bind_tools([Now], tool_choice="any", parallel_tool_calls=False).invoke("How is it?").tool_calls
    assert (call["name"], call["args"]) == ("Now", {})


def test_what_cannot_be_called_is_refused_at_once(stack: Stack) -> None:
    for schema in (
        {"properties": {"a": {"type": "string", "pattern": "("}}},
        {"properties": {"a": {"enum": ["x" * 70_000]}}},
    ):
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        body = {**OPTIONS, "messages": [USER], "tools": tools, "tool_choice": "required"}
        status, answer = stack.post("/v1/chat/completions", body)
        assert status == 400, answer
        assert answer["error"]["param"].startswith("tools"), json.dumps(answer)
