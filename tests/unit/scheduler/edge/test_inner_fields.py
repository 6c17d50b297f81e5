"""Fields of inner objects: each API refuses, or notes, those that it does not read, by one reading."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from coppice_scheduler.edge.anthropic.request import parse_message
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.base.tenant_model import ContextLimit
from coppice_scheduler.edge.frontend.generation_spec import MAX_MESSAGES
from coppice_scheduler.edge.http.field_table import NAME_CHARS, Notes, Reading, UnknownFields, without_effect
from coppice_scheduler.edge.openai.parsing.schema import parse_chat
from coppice_scheduler.edge.openai.responses.request import parse_response

Parse = Callable[[bytes, Reading], Any]
MESSAGES = [{"role": "user", "content": "x"}]


def chat(more: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "f", **more}
    return {"model": "m", "messages": MESSAGES, "tools": [{"type": "function", "function": function}]}


def response(more: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "input": "x", "tools": [{"type": "function", "name": "f", **more}]}


def message(more: dict[str, Any]) -> dict[str, Any]:
    tool = {"name": "f", "input_schema": {"type": "object"}, **more}
    return {"model": "m", "max_tokens": 1, "messages": MESSAGES, "tools": [tool]}


APIS = pytest.mark.parametrize(
    ("parse", "body", "where"),
    [
        (parse_chat, chat, "tools[0].function"),
        (parse_response, response, "tools[0]"),
        (parse_message, message, "tools[0]"),
    ],
    ids=["chat", "response", "message"],
)


def ignored(parse: Parse, body: dict[str, Any], unknown: UnknownFields) -> tuple[str, ...]:
    names: tuple[str, ...] = parse(json.dumps(body).encode(), Reading(ContextLimit(1000), unknown)).ignored
    return names


@APIS
def test_what_nobody_reads_is_refused_by_its_place(parse: Parse, body: Any, where: str) -> None:
    with pytest.raises(ApiError) as refused:
        ignored(parse, body({"colour": "red"}), UnknownFields.REFUSE)
    assert refused.value.message == f"{where}.colour is not supported."
    assert (refused.value.param, refused.value.code) == (f"{where}.colour", "unsupported_parameter")
    with pytest.raises(ApiError) as refused:
        ignored(parse, body({"c" * 300: 1}), UnknownFields.REFUSE)
    assert refused.value.param == f"{where}.{'c' * 100}"


@APIS
def test_or_noted_where_the_operator_has_it_so(parse: Parse, body: Any, where: str) -> None:
    shown = where.replace("[0]", "[]")
    assert ignored(parse, body({"colour": "red"}), UnknownFields.WARN) == (f"{shown}.colour",)
    assert ignored(parse, body({"c" * 300: 1}), UnknownFields.IGNORE) == (f"{shown}.{'c' * 300}"[:NAME_CHARS],)


@APIS
def test_null_is_a_field_that_is_not_there(parse: Parse, body: Any, where: str) -> None:
    assert ignored(parse, body({"colour": None}), UnknownFields.REFUSE) == ()


def test_names_come_in_order_and_each_once() -> None:
    values = {"b": 1, "known": 1, "a": 0, "none": None}
    assert [*without_effect(values, {"known"}, {"a", "b"}, "x", UnknownFields.REFUSE)] == ["b", "a"]
    notes = Notes()
    notes.ignore("b", "a", "b", "n" * (NAME_CHARS + 1))
    notes.ignore("a")
    assert [*notes.ignored] == ["b", "a", "n" * NAME_CHARS]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (None, "messages is required."),
        ("x", "messages must be a list of messages, not a string."),
        (
            [*MESSAGES] * (MAX_MESSAGES + 1),
            f"messages has {MAX_MESSAGES + 1} entries; at most {MAX_MESSAGES} are taken",
        ),
    ],
    ids=["missing", "text", "too many"],
)
@pytest.mark.parametrize(("parse", "body"), [(parse_chat, chat), (parse_message, message)], ids=["chat", "message"])
def test_the_head_of_messages_is_read_alike(parse: Parse, body: Any, messages: Any, told: str) -> None:
    with pytest.raises(ApiError) as refused:
        ignored(parse, {**body({}), "messages": messages}, UnknownFields.REFUSE)
    assert (refused.value.message, refused.value.param) == (told, "messages")
