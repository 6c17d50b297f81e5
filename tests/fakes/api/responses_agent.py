"""A coding agent over `/v1/responses`, with what such agents put into each request.

The documentation of the Responses API says what that is: `store: false`, so the whole conversation comes each time,
with the items of earlier answers, reasoning among them; instructions beside messages of the developer; tools without
`strict`; a key for the cache; labels in headers. The agent reads items from the events as they are done.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

Items = list[dict[str, Any]]
REASONING, MESSAGE, CALL = "reasoning", "message", "function_call"
_PARTS = {REASONING: "response.reasoning_text", MESSAGE: "response.output_text"}
_NEEDED = {
    REASONING: ("type", "summary", "content"),
    MESSAGE: ("type", "role", "content"),
    CALL: ("type", "name", "arguments", "call_id"),
}
HEADERS = {
    "accept": "text/event-stream",
    "authorization": "Bearer none",
    "conversation_id": "0199-7f3a",
    "openai-beta": "responses=experimental",
    "originator": "an_agent_cli",
    "session_id": "0199-7f3a",
    "user-agent": "an_agent_cli/0.9 (Debian 13; x86_64) xterm",
    "version": "0.9.0",
}
# Of its requests, where the chat template has no place for an effort.
NO_EFFECT = {
    "store",
    "text.verbosity",
    "reasoning.effort",
    "reasoning.summary",
    "include.reasoning.encrypted_content",
}
_TEXT: dict[str, Any] = {"type": "string"}
_STEP: dict[str, Any] = {
    "type": "object",
    "properties": {"step": _TEXT, "status": {"type": "string", "description": "pending, in_progress or completed"}},
    "required": ["step", "status"],
    "additionalProperties": False,
}


def function(name: str, description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return {"type": "function", "name": name, "description": description, "strict": False, "parameters": parameters}


TOOLS = [
    function(
        "shell",
        "Runs a command and tells its output.",
        ["command"],
        command={"type": "array", "items": _TEXT},
        workdir={**_TEXT, "description": "Where it runs"},
        timeout_ms={"type": "number"},
    ),
    function("update_plan", "Keeps the plan.", ["plan"], explanation=_TEXT, plan={"type": "array", "items": _STEP}),
    function("view_image", "Attaches an image.", ["path"], path=_TEXT),
]


def message(role: str, *texts: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text} for text in texts]}


def output(call_id: str, text: str, exit_code: int = 0) -> dict[str, Any]:
    told = {"output": text, "metadata": {"exit_code": exit_code, "duration_seconds": 0.1}}
    return {"type": "function_call_output", "call_id": call_id, "output": json.dumps(told)}


@dataclass
class Agent:
    """One session. `more` goes into each request.

    `encrypted` is what it sends of `encrypted_content` with reasoning; `keeps_all`: whether it sends all of an item.
    """

    post: Callable[[dict[str, Any], dict[str, str]], httpx.Response]  # body and headers
    model: str
    items: Items
    tools: Items = field(default_factory=lambda: TOOLS)
    encrypted: dict[str, Any] = field(default_factory=dict)
    keeps_all: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def request(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "instructions": "You are a coding agent. Read before you write.",
            "input": self.items,
            "tools": self.tools,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199-7f3a",
            "text": {"verbosity": "low"},
            **self.more,
        }

    def turn(self) -> Items:
        """The events of one answer, in their documented order; its items are a part of what is sent next."""
        response = self.post(self.request(), HEADERS)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        listed = response.headers["x-coppice-ignored-fields"].split(", ")
        assert set(listed) == NO_EFFECT, "nothing of the items is worth a word"
        blocks = [block.split("\n") for block in response.text.split("\n\n") if block.strip("\n")]
        events: Items = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
        assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
        check_events(events)
        self.items = self.items + [self._kept(item) for item in items_of(events)]
        return events

    def _kept(self, item: dict[str, Any]) -> dict[str, Any]:
        kept = item if self.keeps_all else {name: item[name] for name in _NEEDED[item["type"]]}
        return {**kept, **self.encrypted} if item["type"] == REASONING else kept


def items_of(events: Items) -> Items:
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


def check_events(events: Items) -> None:
    """They are numbered and in their documented order, and those at the end tell what the others told."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = items_of(events)
    assert _without_repeated_deltas([event["type"] for event in events]) == _order_of([item["type"] for item in done])
    completed = events[-1]["response"]
    assert {event["response"]["id"] for event in events if "response" in event} == {completed["id"]}
    assert (completed["output"], completed["status"], completed["store"]) == (done, "completed", False)
    for index, item in enumerate(done):
        of_item = [event for event in events if event.get("output_index") == index]
        assert {event.get("item_id", item["id"]) for event in of_item} == {item["id"]}
        told = "".join(event["delta"] for event in of_item if "delta" in event)
        assert told == (item["arguments"] if item["type"] == CALL else item["content"][0]["text"])
    usage = completed["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def _order_of(kinds: list[str]) -> list[str]:
    """Types of events, one in place of many deltas."""
    order = ["response.created", "response.in_progress"]
    for kind in kinds:
        if kind == CALL:
            inner = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
        else:
            part = _PARTS[kind]
            inner = ["response.content_part.added", f"{part}.delta", f"{part}.done", "response.content_part.done"]
        order += ["response.output_item.added", *inner, "response.output_item.done"]
    return [*order, "response.completed"]


def _without_repeated_deltas(types: list[str]) -> list[str]:
    return [kind for place, kind in enumerate(types) if not (kind.endswith(".delta") and types[place - 1] == kind)]
