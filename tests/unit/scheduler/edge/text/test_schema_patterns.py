"""Classes in the patterns of a schema mean what all programs agree on, and nothing else of a schema changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coppice.grammar import GrammarError
from coppice_scheduler.edge.text.output_format import json_schema

DIGIT = {"type": "string", "pattern": r"^\d\S$"}
READ = {"type": "string", "pattern": r"^[0-9]\S$"}


@pytest.mark.parametrize(
    ("schema", "read"),
    [
        (DIGIT, READ),
        ({"properties": {"a": DIGIT, "pattern": DIGIT, "const": DIGIT}}, {"a": READ, "pattern": READ, "const": READ}),
        ({"items": {"anyOf": [DIGIT, {"type": "null"}]}}, {"anyOf": [READ, {"type": "null"}]}),
        ({"$defs": {"enum": DIGIT}}, {"enum": READ}),
        ({"patternProperties": {r"^\d$": DIGIT}}, {"^[0-9]$": READ}),
    ],
)
def test_patterns_are_read_wherever_they_are(schema: dict[str, Any], read: Any) -> None:
    found = json_schema(json.dumps(schema))
    assert read in (found, *found.values())


@pytest.mark.parametrize(
    "schema",
    [
        {"const": {"pattern": r"\d"}},
        {"enum": [{"pattern": r"\d"}, 1]},
        {"type": "object", "properties": {"title": True, "default": {"type": "null"}}, "required": ["title"]},
        {"pattern": 5, "properties": [DIGIT["type"]]},
        {"dependentRequired": {"title": ["a"], "default": []}},
    ],
)
def test_what_is_no_pattern_stays(schema: dict[str, Any]) -> None:
    assert json_schema(json.dumps(schema)) == schema


def test_what_says_nothing_about_values_is_dropped() -> None:
    said = {"type": "object", "properties": {"a": {"type": "string"}}}
    told = {
        "title": "T",
        "description": "d",
        "default": {"a": "b"},
        "properties": {"a": {"type": "string", "examples": [1]}},
    }
    assert json_schema(json.dumps({**said, **told})) == said


@pytest.mark.parametrize("text", ["{", "[]", "5", '{"a":' * 100_000, '{"x-guidance": {}}'])
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(GrammarError):
        json_schema(text)
