"""The form that an answer must have: each way of asking reaches the engine as one grammar; what is wrong is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from coppice.grammar import GRAMMAR_BYTES_MAX, GrammarError, Grammars
from coppice_scheduler.core.state.request import OutputError, OutputErrorCode
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text
from coppice_scheduler.edge.text.output_format import MAX_FORMAT_CHOICES
from tests.contract.rest_fixture import served, shared_server
from tests.fakes.api.rest import DEMO, Served, error_of, events_of

__all__ = ["served", "shared_server"]

Body = dict[str, Any]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = r"[a-c]{2}\d"
CHOICES = ["yes", "no", 'a "quote"\n']
LARK = 'start: "left" | "right"'
GBNF = 'root ::= "left" | "right"'
TOO_LONG = {"enum": ["x" * GRAMMAR_BYTES_MAX]}
LONG_PATTERN = r"^(?:\d{4}-\d{2}-\d{2}|[A-Z]{2,3} \w+)$"


def named(schema: Any, **more: Any) -> Body:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}}


def wanted(**formats: Any) -> Body:
    return {"structured_outputs": formats}


# Ways to ask for one form; what then is an answer, and what is none.
WAYS: dict[str, tuple[list[Body], list[str], list[str]]] = {
    "any object": (
        [{"response_format": {"type": "json_object"}}, wanted(json_object=True), wanted(json_object=True, json=None)],
        ["{}", '{"a": [1, {"b": null}]}'],
        ["[1]", "7", '"a"'],
    ),
    "schema": (
        [
            named(SCHEMA),
            named(SCHEMA, strict=True),
            named(SCHEMA, strict=False),
            named(SCHEMA, strict=None, description="of a person"),
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            wanted(json=SCHEMA),
            wanted(json=json.dumps(SCHEMA)),
            wanted(json=json.dumps(SCHEMA, indent=2), regex=None, json_object=False),
            {"guided_json": SCHEMA},
            {"guided_json": json.dumps(SCHEMA)},
        ],
        ['{"name": "Ann", "age": 7}', '{\n  "name":"","age":-1}'],
        [
            '{"name": "Ann"}',
            '{"name": "Ann", "age": "7"}',
            '{"name": "Ann", "age": 7, "x": 1}',
            '{"age": 7, "name": "Ann"}',
            "{}",
        ],
    ),
    "regex": (
        [wanted(regex=REGEX), {"guided_regex": REGEX}],
        ["ab7", "cc0"],
        ["ab", "ab77", "ad7", " ab7"],
    ),
    "choice": (
        [wanted(choice=CHOICES), {"guided_choice": CHOICES}],
        CHOICES,
        ["maybe", "yesno", "ye"],
    ),
    "Lark": (
        [wanted(grammar=LARK), {"guided_grammar": LARK}],
        ["left", "right"],
        ["leftright", "up"],
    ),
    "GBNF": (
        [wanted(grammar=GBNF), {"guided_grammar": GBNF}],
        ["left", "right"],
        ["leftright", "up"],
    ),
}
ANY_ANSWER: list[Body] = [
    {},
    {"response_format": None},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "text", "json_schema": None}},
    {"structured_outputs": None},
    {"structured_outputs": {}},
    {"guided_json": None, "guided_regex": None, "guided_choice": None, "guided_grammar": None},
    {"ignore_eos": True, "min_tokens": 2, "response_format": {"type": "text"}},
]


@pytest.fixture(scope="module")
def compiler() -> Grammars:
    text = load_checkpoint_text(DEMO)
    return Grammars(text.raw.to_str(), text.raw.get_vocab_size(with_added_tokens=True), text.eos_token_ids)


def grammar_of(served: Served, **fields: Any) -> str:
    """What reaches the engine, the same of a chat and of a completion, streamed and whole."""
    served.engine.requests.clear()
    for ask in (served.chat, served.complete):
        for streams in (False, True):
            answer = ask(stream=streams, **fields)
            assert answer.status_code == 200, answer.text
    found = [request.sampling.grammar for request in served.engine.requests]
    assert len(found) == 4
    assert len(set(found)) == 1
    return found[0]


def is_answer(served: Served, compiler: Grammars, grammar: str, text: str) -> bool:
    """Whether the grammar lets all of this text be said, and then an end."""
    matcher = compiler.compile(grammar)
    words = np.empty(-(-compiler.vocab_size // 32), np.uint32)
    try:
        matcher.take(np.array(served.ids(text), np.uint32))
        matcher.fill(words)
    except GrammarError:
        return False
    (end,) = served.checkpoint.eos_token_ids
    return bool(words[end // 32] >> (end % 32) & 1)


@pytest.mark.parametrize("form", WAYS)
def test_every_way_of_asking_is_the_same_grammar(served: Served, compiler: Grammars, form: str) -> None:
    ways, right, wrong = WAYS[form]
    first, *others = [grammar_of(served, **way) for way in ways]
    assert first
    assert all(other == first for other in others)
    assert [text for text in right if not is_answer(served, compiler, first, text)] == []
    assert [text for text in wrong if is_answer(served, compiler, first, text)] == []


def test_forms_differ(served: Served) -> None:
    assert len({grammar_of(served, **ways[0]) for ways, _, _ in WAYS.values()}) == len(WAYS)


@pytest.mark.parametrize("fields", ANY_ANSWER, ids=repr)
def test_where_nothing_is_asked_there_is_no_grammar(served: Served, fields: Body) -> None:
    assert grammar_of(served, **fields) == ""


def test_all_choices_of_all_prompts_have_the_form(served: Served) -> None:
    answer = served.complete(prompt=["one", "two"], n=3, temperature=1, **wanted(regex=REGEX))
    assert answer.status_code == 200, answer.text
    found = [request.sampling.grammar for request in served.engine.requests]
    assert len(found) == 6
    assert found == [grammar_of(served, guided_regex=REGEX)] * 6


def test_the_next_request_without_a_form_has_none(served: Served) -> None:
    assert grammar_of(served, **wanted(regex=REGEX))
    assert grammar_of(served) == ""


def test_whitespace_between_tokens_of_json_is_bounded(served: Served, compiler: Grammars) -> None:
    grammar = grammar_of(served, **named(SCHEMA))
    for spaces, is_right in ((1, True), (40, True), (41, False)):
        text = '{"name":' + " " * spaces + '"","age":1}'
        assert is_answer(served, compiler, grammar, text) == is_right, spaces


def test_a_pattern_that_has_its_end_marked_is_that_of_the_whole_text(served: Served, compiler: Grammars) -> None:
    grammar = grammar_of(served, **named({"type": "string", "pattern": LONG_PATTERN}))
    assert is_answer(served, compiler, grammar, '"2026-11-24"')
    assert not is_answer(served, compiler, grammar, '"on 2026-11-24"')


@pytest.mark.parametrize(
    ("regex", "right", "wrong"),
    [
        (r"^\d$", "7", "77"),
        (r"\d", "7", "\u0663"),
        (r"\w", "a", "\u00e9"),
        (r"\s", " ", "\u3000"),
        (r"[\d.]", ".", "\u0663"),
        (r"[^\d]", "a", "\u0663"),
        (r"[^\w]", "-", "\u00e9"),
        (r"[^\s]", "a", "\u3000"),
        (r"[^\S]", " ", "\u3000"),
        (r"\D", "a", "\u0663"),
        (r"\\d", "\\d", "7"),
    ],
)
def test_what_a_class_matches_matches_in_every_reader_of_the_regex(
    served: Served, compiler: Grammars, regex: str, right: str, wrong: str
) -> None:
    """Readers differ in whether `\\d`, `\\w` and `\\s` are ASCII: what some of them do not match is not said."""
    grammar = grammar_of(served, **wanted(regex=regex))
    assert is_answer(served, compiler, grammar, right)
    assert not is_answer(served, compiler, grammar, wrong)


# --- refusals -----------------------------------------------------------------------------------------------------

UNSUPPORTED, UNUSABLE, MISSING = "unsupported_parameter", "invalid_output_format", "missing"
SCHEMA_FIELD = "response_format.json_schema.schema"
JSON, REGEX_FIELD, CHOICE = "structured_outputs.json", "structured_outputs.regex", "structured_outputs.choice"
GRAMMAR = "structured_outputs.grammar"

# What is sent, the field that the error names, its code, and words of its message beside the field.
REFUSALS: list[tuple[Body, str, str | None, list[str]]] = [
    # two at once
    ({**named(SCHEMA), "guided_regex": "a"}, "guided_regex", None, [SCHEMA_FIELD, "send one"]),
    ({**named(SCHEMA), **wanted(json=SCHEMA)}, JSON, None, [SCHEMA_FIELD, "send one"]),
    ({**wanted(regex="a"), "guided_regex": "a"}, "guided_regex", None, [REGEX_FIELD, "send one"]),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", None, ["guided_regex", "send one"]),
    (wanted(regex="a", choice=["a"]), "structured_outputs", None, ["exactly one of", "json, regex, choice, grammar"]),
    (wanted(json_object=True, regex="a"), "structured_outputs", None, ["exactly one of"]),
    (wanted(json=None), "structured_outputs", None, ["exactly one of"]),
    (wanted(json_object=False), "structured_outputs", None, ["exactly one of"]),
    # forms of the fields themselves
    ({"response_format": "json"}, "response_format", None, ["an object, not a string"]),
    ({"response_format": []}, "response_format", None, ["an object, not an empty list"]),
    ({"response_format": {}}, "response_format.type", MISSING, ["required"]),
    ({"response_format": {"type": 5}}, "response_format.type", None, ["a string, not an integer"]),
    ({"response_format": {"type": "yaml"}}, "response_format.type", UNSUPPORTED, ["'yaml'", "json_object"]),
    ({"response_format": {"type": "y" * 500}}, "response_format.type", UNSUPPORTED, ["'" + "y" * 50 + "'"]),
    ({"response_format": {"type": "text", "hue": 1}}, "response_format.hue", UNSUPPORTED, ["known are type"]),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
        "response_format.json_schema",
        UNSUPPORTED,
        ["known are type"],
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None, ["name and schema", "null"]),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA_FIELD, None, ["an object"]),
    (named("{}"), SCHEMA_FIELD, None, ["an object, not a string"]),
    (named([]), SCHEMA_FIELD, None, ["an object, not an empty list"]),
    (named(SCHEMA, hue=1), "response_format.json_schema.hue", UNSUPPORTED, ["name, description, schema, strict"]),
    (named(SCHEMA, strict="yes"), "response_format.json_schema.strict", None, ["true or false, not a string"]),
    (named(SCHEMA, name=5), "response_format.json_schema.name", None, ["a string, not an integer"]),
    (named(SCHEMA, description=[1]), "response_format.json_schema.description", None, ["a string"]),
    ({"structured_outputs": "a"}, "structured_outputs", None, ["an object, not a string"]),
    ({"structured_outputs": [SCHEMA]}, "structured_outputs", None, ["an object"]),
    (wanted(hue=1), "structured_outputs.hue", UNSUPPORTED, ["json_object, json, regex, choice, grammar"]),
    (wanted(json_object="yes"), "structured_outputs.json_object", None, ["true or false, not a string"]),
    (wanted(json=[]), JSON, None, ["an object, or its text, not an empty list"]),
    (wanted(regex=5), REGEX_FIELD, None, ["a string, not an integer"]),
    (wanted(choice="a"), CHOICE, None, ["a list of strings, not a string"]),
    (wanted(choice=["a", 1]), CHOICE, None, ["a list of strings, not a list with other entries"]),
    (wanted(grammar={}), GRAMMAR, None, ["a string, not an object"]),
    ({"guided_json": 5}, "guided_json", None, ["an object, or its text, not an integer"]),
    ({"guided_choice": {}}, "guided_choice", None, ["a list of strings, not an object"]),
    # schemas
    (named({"not": {}}), SCHEMA_FIELD, UNUSABLE, ['"not"']),
    (named({"type": "array", "uniqueItems": True}), SCHEMA_FIELD, UNUSABLE, ['"uniqueItems"']),
    (named({"properties": {"a": {"if": {}, "then": {}}}}), SCHEMA_FIELD, UNUSABLE, ['"if"', '"then"']),
    (named({"type": "strin"}), SCHEMA_FIELD, UNUSABLE, ["Invalid type", "strin"]),
    (named({"enum": []}), SCHEMA_FIELD, UNUSABLE, ["Unsatisfiable"]),
    (named({"type": "string", "pattern": "(?=a)b"}), SCHEMA_FIELD, UNUSABLE, ["look-around"]),
    (named({"$ref": "http://example.com/x"}), SCHEMA_FIELD, UNUSABLE, ["http://example.com/x"]),
    (named(TOO_LONG), SCHEMA_FIELD, UNUSABLE, ["longer than 64 KiB"]),
    (wanted(json="{"), JSON, UNUSABLE, ["no JSON"]),
    (wanted(json="[]"), JSON, UNUSABLE, ["must be an object"]),
    (wanted(json=""), JSON, UNUSABLE, ["no JSON"]),
    (wanted(json='{"items":' * 5000 + "{}" + "}" * 5000), JSON, UNUSABLE, ["recursion"]),
    (wanted(json='{"const": NaN}'), JSON, UNUSABLE, []),  # JSON to Python alone
    (wanted(json='{"const": 1e400}'), JSON, UNUSABLE, []),
    (wanted(json='{"const": "\\ud800"}'), JSON, UNUSABLE, []),
    (named({"const": 10**400}), SCHEMA_FIELD, UNUSABLE, []),
    (wanted(json={"not": {}}), JSON, UNUSABLE, ['"not"']),
    (wanted(json=json.dumps(TOO_LONG)), JSON, UNUSABLE, ["longer than 64 KiB"]),
    ({"guided_json": {"not": {}}}, "guided_json", UNUSABLE, ['"not"']),
    ({"guided_json": "no json"}, "guided_json", UNUSABLE, ["no JSON"]),
    # regexes
    (wanted(regex="("), REGEX_FIELD, UNUSABLE, ["unclosed group"]),
    (wanted(regex=""), REGEX_FIELD, UNUSABLE, ["empty"]),
    (wanted(regex="(?=a)b"), REGEX_FIELD, UNUSABLE, ["look-around"]),
    (wanted(regex="(?<!a)b"), REGEX_FIELD, UNUSABLE, ["look-around"]),
    (wanted(regex=r"(a)\1"), REGEX_FIELD, UNUSABLE, ["backreferences"]),
    (wanted(regex="x" * GRAMMAR_BYTES_MAX), REGEX_FIELD, UNUSABLE, ["longer than 64 KiB"]),
    ({"guided_regex": "[z-a]"}, "guided_regex", UNUSABLE, ["invalid"]),
    # choices
    (wanted(choice=[]), CHOICE, UNUSABLE, ["one choice at least"]),
    (wanted(choice=["a", ""]), CHOICE, UNUSABLE, ["none may be empty"]),
    (wanted(choice=["a"] * (MAX_FORMAT_CHOICES + 1)), CHOICE, None, ["1025", "1024"]),
    (wanted(choice=["x" * GRAMMAR_BYTES_MAX]), CHOICE, UNUSABLE, ["longer than 64 KiB"]),
    ({"guided_choice": []}, "guided_choice", UNUSABLE, ["one choice at least"]),
    # grammars
    (wanted(grammar=""), GRAMMAR, UNUSABLE, ["empty"]),
    (wanted(grammar="start: x"), GRAMMAR, UNUSABLE, ["unknown name"]),
    (wanted(grammar='start: "a" ('), GRAMMAR, UNUSABLE, []),
    (wanted(grammar='root ::= "a" | ('), GRAMMAR, UNUSABLE, ["no GBNF"]),
    (wanted(grammar="root ::= " + "(" * 20_000), GRAMMAR, UNUSABLE, ["no GBNF"]),
    (wanted(grammar='root ::= "a"' + "# ::=\n" * GRAMMAR_BYTES_MAX), GRAMMAR, UNUSABLE, ["longer than 64 KiB"]),
    (wanted(grammar="words that are no grammar"), GRAMMAR, UNUSABLE, []),
    ({"guided_grammar": "start: x"}, "guided_grammar", UNUSABLE, ["unknown name"]),
    # what contradicts a form
    ({**named(SCHEMA), "ignore_eos": True}, "ignore_eos", UNSUPPORTED, [SCHEMA_FIELD, "Leave one out"]),
    ({**wanted(regex="a"), "min_tokens": 1}, "min_tokens", UNSUPPORTED, [REGEX_FIELD, "Leave one out"]),
    ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", UNSUPPORTED, ["guided_choice", "Leave one out"]),
    (
        {"response_format": {"type": "json_object"}, "min_tokens": 3},
        "min_tokens",
        UNSUPPORTED,
        ["response_format", "Leave one out"],
    ),
]


@pytest.mark.parametrize(("fields", "field", "code", "words"), REFUSALS, ids=lambda value: repr(value)[:60])
def test_what_cannot_be_is_refused_by_name(
    served: Served, fields: Body, field: str, code: str | None, words: list[str]
) -> None:
    for ask in (served.chat, served.complete):
        error = error_of(ask(**fields), 400)
        assert (error["param"], error["code"], error["type"]) == (field, code, "invalid_request_error")
        for word in (field, *words):
            assert word in error["message"]
        assert len(error["message"]) < 1000
    assert error_of(served.chat(stream=True, **fields), 400) == error
    assert served.engine.requests == []


def test_options_that_are_off_contradict_no_form(served: Served) -> None:
    assert grammar_of(served, ignore_eos=False, min_tokens=0, **wanted(regex=REGEX))


def test_as_many_and_as_long_as_may_be(served: Served) -> None:
    choices = [f"choice {number}" for number in range(MAX_FORMAT_CHOICES)]
    assert grammar_of(served, **wanted(choice=choices))
    assert grammar_of(served, **wanted(choice=["x" * (GRAMMAR_BYTES_MAX - 100)]))


def test_one_that_is_refused_changes_nothing_for_the_next(served: Served) -> None:
    def answers() -> list[httpx.Response]:
        return [served.chat(**wanted(regex="(")), served.chat(**wanted(regex="a")), served.chat()]

    for wrong, right, free in (answers(), answers()):
        assert (wrong.status_code, right.status_code, free.status_code) == (400, 200, 200)


def test_a_grammar_that_takes_too_much_work_is_the_callers_fault(served: Served) -> None:
    served.says("a", error=OutputError(OutputErrorCode.GRAMMAR, "make it simpler"))
    error = error_of(served.complete(**wanted(regex="a+")), 400)
    assert (error["code"], error["type"]) == ("grammar_limit", "invalid_request_error")
    assert "make it simpler" in error["message"]
    *_, last = events_of(served.complete(stream=True, **wanted(regex="a+")).text)
    assert last["error"]["code"] == "grammar_limit"
