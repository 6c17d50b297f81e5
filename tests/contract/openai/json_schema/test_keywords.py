"""Each keyword of JSON Schema does what the table of docs/API.md says: answers are valid, or 400 names the keyword."""

from __future__ import annotations

import json

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import Tokenizer

from coppice.grammar import GrammarError, Grammars
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from coppice_scheduler.edge.text.output_format import FormatKind, OutputFormat, grammar_of
from tests.contract.openai.json_schema.keywords import DRAFT, KEYWORDS, OTHER_FORMATS, Becomes, Case, Schema
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.rest import DEMO, Served, error_of

__all__ = ["served", "shared_server"]

# By vocabulary, as the specification lists them.
OF_2020_12 = {
    *("$id", "$schema", "$ref", "$anchor", "$dynamicRef", "$dynamicAnchor", "$vocabulary", "$comment", "$defs"),
    *("prefixItems", "items", "contains", "additionalProperties", "properties", "patternProperties"),
    *("dependentSchemas", "propertyNames", "if", "then", "else", "allOf", "anyOf", "oneOf", "not"),
    *("unevaluatedItems", "unevaluatedProperties"),
    *("type", "const", "enum", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
    *("maxLength", "minLength", "pattern", "maxItems", "minItems", "uniqueItems", "maxContains", "minContains"),
    *("maxProperties", "minProperties", "required", "dependentRequired"),
    *("title", "description", "default", "deprecated", "readOnly", "writeOnly", "examples"),
    *("format", "contentEncoding", "contentMediaType", "contentSchema"),
}
CASES = [(name, case) for name, keyword in KEYWORDS.items() for case in keyword.cases]
REFUSED = [(name, schema) for name, keyword in KEYWORDS.items() for schema in keyword.refused]
# Whose refusal tells what is wrong with the value, in other words.
BY_VALUE = {"enum": "Unsatisfiable", "type": "Invalid type", "minProperties": "roperties", "maxProperties": "roperties"}
BY_VALUE |= {"patternProperties": "patternProperty", "pattern": "regex", "$ref": "https://example.com/other"}


class Answers:
    """What the demo model may say."""

    def __init__(self) -> None:
        text = load_checkpoint_text(DEMO)
        self.tokenizer: Tokenizer = text.raw
        self.grammars = Grammars(text.raw.to_str(), text.raw.get_vocab_size(with_added_tokens=True), text.eos_token_ids)
        (self.end,) = text.eos_token_ids

    def allow(self, schema: Schema, text: str) -> bool:
        """Whether this and an end may be said: in the tokenizer's tokens, and character by character."""
        wanted = OutputFormat(FormatKind.JSON, json.dumps(schema), "f")
        compiled = self.grammars.compile(grammar_of(wanted))
        found = set()
        for tokens in (self.tokenizer.encode(text).ids, self._one_by_one(text)):
            assert self.tokenizer.decode(tokens) == text
            matcher, words = compiled.copy(), np.empty(-(-self.grammars.vocab_size // 32), np.uint32)
            try:
                matcher.take(np.array(tokens, np.uint32))
                matcher.fill(words)
            except GrammarError:
                found.add(False)
                continue
            found.add(bool(words[self.end // 32] >> (self.end % 32) & 1))
        (is_allowed,) = found
        return is_allowed

    def _one_by_one(self, text: str) -> list[int]:
        return [token for character in text for token in self.tokenizer.encode(character).ids]


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers()


def test_every_keyword_is_in_the_table() -> None:
    assert OF_2020_12 - KEYWORDS.keys() == set()
    for name, keyword in KEYWORDS.items():
        assert keyword.cases or keyword.becomes is Becomes.REFUSED, name
        assert keyword.refused or keyword.becomes is not Becomes.REFUSED, name
        if keyword.becomes is Becomes.FOLLOWED:
            assert any(case.valid for case in keyword.cases), name
            assert any(case.invalid for case in keyword.cases), name


@pytest.mark.parametrize(
    ("name", "case"), CASES, ids=[f"{name}-{json.dumps(case.schema)[:50]}" for name, case in CASES]
)
def test_what_is_valid_may_be_said_and_nothing_else(answers: Answers, name: str, case: Case) -> None:
    assert f'"{name}":' in json.dumps(case.schema)
    assert [text for text in (*case.valid, *case.loose) if not answers.allow(case.schema, text)] == []
    assert [text for text in (*case.invalid, *case.unwritten) if answers.allow(case.schema, text)] == []


@pytest.mark.parametrize(
    ("name", "case"), CASES, ids=[f"{name}-{json.dumps(case.schema)[:50]}" for name, case in CASES]
)
def test_another_validator_agrees(name: str, case: Case) -> None:
    """So that the table cannot tell of the library what the library says of itself."""
    validator = jsonschema_rs.validator_for({"$schema": DRAFT, **case.schema}, validate_formats=True)

    def is_valid(text: str) -> bool:
        try:
            return validator.is_valid(json.loads(text))
        except ValueError:
            return False

    assert [text for text in (*case.valid, *case.unwritten) if not is_valid(text)] == []
    assert [text for text in (*case.invalid, *case.loose) if is_valid(text)] == []


@pytest.mark.parametrize(
    ("name", "schema"), REFUSED, ids=[f"{name}-{json.dumps(schema)[:50]}" for name, schema in REFUSED]
)
def test_what_is_not_supported_is_refused_by_its_name(served: Served, name: str, schema: Schema) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = error_of(served.chat(response_format=form), 400)
    assert (error["param"], error["code"]) == ("response_format.json_schema.schema", "invalid_output_format")
    assert BY_VALUE.get(name, name) in error["message"]
    assert "coerce" not in error["message"]
    assert served.engine.requests == []


def test_formats_are_of_either_kind() -> None:
    followed = {str(case.schema["format"]) for case in KEYWORDS["format"].cases}
    assert not followed & set(OTHER_FORMATS)
    assert len(followed | set(OTHER_FORMATS)) == 19  # that JSON Schema 2020-12 has
