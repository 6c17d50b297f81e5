"""Forced calls in XML: written as the family writes them, read back as what the schema asks for."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest

from coppice_scheduler.edge.text.tools.call_grammar import (
    calls_grammar,
    can_be_bound,
    format_for_grammar,
    text_grammar,
    what_is_wrong,
)
from coppice_scheduler.edge.text.tools.call_parser import CallDelta
from coppice_scheduler.edge.text.tools.formats import (
    GLM45,
    KEY_PLACE,
    LLAMA3_JSON,
    QWEN3_CODER,
    VALUE_PLACE,
    ToolFormat,
)
from coppice_scheduler.edge.text.tools.tool import Tool, ToolMode, ToolUse
from coppice_scheduler.edge.text.tools.xml_calls import XmlCalls, text_arguments
from tests.unit.scheduler.edge.text.tools.test_call_grammar import Vocabulary

INTEGER = {"type": "integer", "minimum": 1, "maximum": 9}
BOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "class": {"enum": ["first", "second"]},
        "days": INTEGER,
        "window": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "seats": {"type": "array", "items": {"$ref": "#/$defs/seat"}, "maxItems": 2},
        "level": {"enum": [1, "x<y", None]},
    },
    "required": ["city", "days"],
    "$defs": {"seat": {"type": "object", "properties": {"row": INTEGER}, "additionalProperties": False}},
}
NOW: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = (Tool("book", json.dumps(BOOK)), Tool("now", json.dumps(NOW)))
NAMES = frozenset({"book", "now"})
REQUIRED = ToolUse(TOOLS, ToolMode.REQUIRED, NAMES)
TEXTS = frozenset((tool.name, name) for tool in TOOLS for name in text_arguments(tool.parameters))
Values = dict[str, str]


@pytest.fixture(scope="module", params=[True, False], ids=["markers", "letters"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(request.param)


@pytest.fixture(params=[QWEN3_CODER, GLM45], ids=lambda each: each.name)
def xml_format(request: pytest.FixtureRequest) -> ToolFormat:
    assert isinstance(request.param, ToolFormat)
    return request.param


def call(tool_format: ToolFormat, name: str, values: Values) -> str:
    """As the chat template of the family writes it."""
    assert tool_format.xml is not None
    argument = tool_format.xml.argument
    said = "".join(argument.replace(KEY_PLACE, key).replace(VALUE_PLACE, value) for key, value in values.items())
    return tool_format.before.replace("NAME", name) + said + tool_format.after


def read(tool_format: ToolFormat, answer: str) -> list[tuple[str, Any]]:
    parser = XmlCalls(tool_format, TEXTS, NAMES, lambda: "id")
    parser.feed(answer)
    parser.flush()
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in parser.take():
        assert isinstance(delta, CallDelta), "nothing is left over as text"
        names[delta.index] = names.get(delta.index, "") + (delta.name or "")
        arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    return [(names[index], json.loads(arguments[index])) for index in names]


def test_calls_are_forced_in_xml(vocabulary: Vocabulary, xml_format: ToolFormat) -> None:
    assert format_for_grammar(REQUIRED, xml_format) is xml_format
    grammar = calls_grammar(REQUIRED, xml_format, vocabulary.raw.token_to_id)
    word = "True" if xml_format is QWEN3_CODER else "true"
    least = {"city": "Ulm", "days": "3"}
    full = {
        "city": 'Ulm <b>\n"x"</par',
        "class": "second",
        "days": "3",
        "window": word,
        "note": '"a \\u003c b"',
        "seats": '[{"row": 1}, {"row": 2}]',
        "level": '"x\\u003cy"',
    }
    for values in (least, full):
        text = call(xml_format, "book", values)
        assert vocabulary.takes(grammar, text)
        assert vocabulary.takes(grammar, text + xml_format.between + call(xml_format, "now", {}))
    book = {"city": 'Ulm <b>\n"x"</par', "class": "second", "days": 3, "window": True}
    book |= {"note": "a < b", "seats": [{"row": 1}, {"row": 2}], "level": "x<y"}
    assert read(xml_format, call(xml_format, "book", full)) == [("book", book)]


@pytest.mark.parametrize(
    "values",
    [
        {"city": "Ulm"},
        {"days": "3", "city": "Ulm"},
        {"city": "Ulm", "days": "0"},
        {"city": "Ulm", "days": "3", "class": "third"},
        {"city": "Ulm", "class": "third", "days": "3"},
        {"city": "Ulm", "days": "3", "window": "yes"},
        {"city": "Ulm", "days": "3", "seats": "[{}, {}, {}]"},
        {"city": "Ulm", "days": "3", "town": "Ulm"},
        {},
    ],
    ids=str,
)
def test_what_does_not_follow_the_schema_is_not_taken(
    vocabulary: Vocabulary, xml_format: ToolFormat, values: Values
) -> None:
    grammar = calls_grammar(REQUIRED, xml_format, vocabulary.raw.token_to_id)
    assert not vocabulary.takes(grammar, call(xml_format, "book", values))


def test_whatever_is_drawn_follows_the_schema(vocabulary: Vocabulary, xml_format: ToolFormat) -> None:
    grammar = calls_grammar(REQUIRED, xml_format, vocabulary.raw.token_to_id)
    validators = {tool.name: jsonschema_rs.validator_for(json.loads(tool.parameters)) for tool in TOOLS}
    ends = ("\n</parameter>\n", "</arg_value>\n", '"')
    for seed in range(30):
        answer = vocabulary.random_answer(grammar, random.Random(seed), ends)
        calls = read(xml_format, answer)
        assert calls, answer
        for name, arguments in calls:
            validators[name].validate(arguments)


def test_with_strict_tools_text_is_free_and_calls_are_bound(vocabulary: Vocabulary, xml_format: ToolFormat) -> None:
    use = ToolUse((replace(TOOLS[0], is_strict=True), TOOLS[1]), ToolMode.AUTO, NAMES)
    grammar = text_grammar(use, xml_format, vocabulary.raw.token_to_id)
    right = call(xml_format, "book", {"city": "Ulm", "days": "3"})
    for text in ("", "Hello <b>", right, f"I look.\n{right}\n\nDone."):
        assert vocabulary.takes(grammar, text), text
    assert not vocabulary.takes(grammar, call(xml_format, "book", {"city": "Ulm"}))


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "pattern": "a+"}}},
        {"properties": {"a": {"type": "string", "maxLength": 3}}},
        {"properties": {"a": {}}},
        {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "string"}}},
        {"properties": {"a": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}}},
        {"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "null"}]}}},
        {"properties": {"a": {"enum": ["</parameter>", "</arg_value>"]}}},
        {"properties": {"a": {"enum": []}}},
        {"properties": {"a<": {"type": "string"}}},
        {"properties": {"a": {"type": "string"}}, "additionalProperties": True},
        {"properties": {"a": {"type": "string"}}, "required": ["b"]},
        {"properties": {"a": {"type": "string"}}, "minProperties": 1},
        {"anyOf": [NOW]},
    ],
    ids=json.dumps,
)
def test_what_xml_cannot_say_is_forced_as_json(xml_format: ToolFormat, parameters: dict[str, Any]) -> None:
    use = ToolUse((Tool("f", json.dumps(parameters)), TOOLS[1]), ToolMode.REQUIRED, frozenset({"f", "now"}))
    assert not can_be_bound(use, xml_format)
    assert format_for_grammar(use, xml_format) is LLAMA3_JSON
    assert can_be_bound(replace(use, names=frozenset({"now"})), xml_format), "only tools that may be called count"


def test_the_tool_is_found_that_the_library_complains_of(vocabulary: Vocabulary, xml_format: ToolFormat) -> None:
    wrong = Tool("wrong", '{"properties": {"a": {"type": "array", "items": {"type": "foo"}}}}')
    use = ToolUse((*TOOLS, wrong), ToolMode.REQUIRED, frozenset({"now", "wrong"}))
    grammar = calls_grammar(use, xml_format, vocabulary.raw.token_to_id)
    with pytest.raises(ValueError, match="foo") as caught:
        vocabulary.matcher(grammar)
    place, problem = what_is_wrong(grammar, str(caught.value))
    assert place == 2
    assert "foo" in problem
