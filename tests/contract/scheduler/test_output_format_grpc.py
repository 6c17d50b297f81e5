"""The form of an answer over gRPC: each way of asking reaches the engine, what is wrong names its field."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from coppice.grammar import GRAMMAR_BYTES_MAX
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode
from coppice_scheduler.edge.text.output_format import MAX_FORMAT_CHOICES, FormatKind, OutputFormat, grammar_of
from tests.fakes.api.grpc_served import Served, details_of, serve

SCHEMA = json.dumps({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]})
LARK = 'start: "left" | "right"'
GBNF = 'root ::= "left" | "right"'

FORMS: list[tuple[dict[str, Any], OutputFormat]] = [
    ({"json_object": True}, OutputFormat(FormatKind.JSON_OBJECT, "", "json_object")),
    ({"json_schema": SCHEMA}, OutputFormat(FormatKind.JSON, SCHEMA, "json_schema")),
    ({"regex": "[ab]+"}, OutputFormat(FormatKind.REGEX, "[ab]+", "regex")),
    ({"choice": pb.Choices(texts=["yes", "no"])}, OutputFormat(FormatKind.CHOICE, ("yes", "no"), "choice")),
    ({"grammar": LARK}, OutputFormat(FormatKind.GRAMMAR, LARK, "grammar")),
    ({"grammar": GBNF}, OutputFormat(FormatKind.GRAMMAR, GBNF, "grammar")),
]

REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"json_schema": "{"}, "json_schema", "no JSON"),
    ({"json_schema": ""}, "json_schema", "no JSON"),
    ({"json_schema": "[]"}, "json_schema", "must be an object"),
    ({"json_schema": '{"not": {}}'}, "json_schema", '"not"'),
    ({"json_schema": json.dumps({"enum": ["x" * GRAMMAR_BYTES_MAX]})}, "json_schema", "longer than 64 KiB"),
    ({"regex": "("}, "regex", "unclosed group"),
    ({"regex": ""}, "regex", "empty"),
    ({"regex": "(?=a)b"}, "regex", "look-around"),
    ({"choice": pb.Choices()}, "choice", "one choice at least"),
    ({"choice": pb.Choices(texts=["a", ""])}, "choice", "none may be empty"),
    ({"choice": pb.Choices(texts=["a"] * (MAX_FORMAT_CHOICES + 1))}, "choice", "1025"),
    ({"grammar": ""}, "grammar", "empty"),
    ({"grammar": "start: x"}, "grammar", "unknown name"),
    ({"grammar": 'root ::= "a" ('}, "grammar", "no GBNF"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "cannot be combined with regex"),
    ({"json_object": True, "min_tokens": 2}, "min_tokens", "cannot be combined with json_object"),
]


@pytest.mark.parametrize(("fields", "form"), FORMS, ids=lambda value: repr(value)[:40])
def test_each_form_reaches_the_engine(fields: dict[str, Any], form: OutputFormat) -> None:
    async def test(served: Served) -> None:
        assert await served.ask(**fields)
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
        assert await served.ask(chat=chat, n=2, **fields)
        found = [request.sampling.grammar for request in served.engine.requests]
        assert found == [grammar_of(form)] * 3

    serve(test)


@pytest.mark.parametrize("fields", [{}, {"json_object": False}, {"json_object": False, "ignore_eos": True}], ids=repr)
def test_where_nothing_is_asked_there_is_no_grammar(fields: dict[str, Any]) -> None:
    async def test(served: Served) -> None:
        assert await served.ask(**fields)
        (request,) = served.engine.requests
        assert request.sampling.grammar == ""

    serve(test)


def test_what_cannot_be_is_refused_by_name() -> None:
    async def test(served: Served) -> None:
        for fields, field, words in REFUSALS:
            error = await served.refusal(**fields)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, fields
            (violation,) = details_of(error)["BadRequest"].field_violations
            assert (violation.field, violation.description) == (field, error.details()), fields
            assert field in violation.description
            assert words in violation.description
        assert served.engine.requests == []
        assert await served.ask(regex="a")

    serve(test)


def test_a_grammar_that_takes_too_much_work_is_the_callers_fault() -> None:
    async def test(served: Served) -> None:
        served.says("a", error=OutputError(OutputErrorCode.GRAMMAR, "make it simpler"))
        error = await served.refusal(regex="a+")
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "make it simpler" in (error.details() or "")
        assert details_of(error)["ErrorInfo"].reason == "grammar_limit"

    serve(test)
