"""The form that an answer must have: what a client asks for, to the text of a grammar."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from math import lcm
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from coppice.grammar import GRAMMAR_BYTES_MAX, GrammarError
from coppice_scheduler.edge.text.reasoning.grammar import BehindReasoning

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Without `u`: `\u0061` is `a`, and the library would take it for a name that the schema does not have.
JSON_ESCAPES = '"\\bfnrt'
# Between two tokens of JSON: a model that is made to go on writes whitespace without end where it may.
JSON_LIBRARY_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}",
    "lenient": False,
    "json_allowed_escapes": JSON_ESCAPES,
}
# A class may stand in another one.
_TAKEN = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]", r"\s": r"[\t\n\f\r ]"}
_LEFT_OUT = {r"\D": "[^0-9]", r"\W": "[^0-9A-Za-z_]", r"\S": r"[^\t\n\f\r ]"}
_REGEX_PIECE = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)  # a bracket that is first in a class does not end it
ANY_OBJECT = '{"type":"object"}'
_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*(-?[0-9][0-9.]*(?:[eE][+-]?[0-9]+)?)')
_UNICODE_ESCAPE = re.compile(r"\\u00([0-7][0-9a-fA-F])")
_MULTIPLE_MAX = 20_000  # 0.1 s of compiling
_MULTIPLE_DIGITS = 18
# Keywords of JSON Schema whose values have names of the client's, and those whose values are no schemas.
_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependentRequired", "dependencies"}
)
_DATA = frozenset({"const", "enum"})
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"}
)  # which say nothing about values
_TOO_LONG = f"it, or the grammar that is made of it, is longer than {GRAMMAR_BYTES_MAX >> 10} KiB"
MAX_FORMAT_CHOICES = 1024


class FormatKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON = "json"  # that a schema describes
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    TOOL_CALLS = "tool_calls"  # a grammar of ours, made of the tools of a request


# What a client may ask for by these names.
ASKED_KINDS = tuple(kind for kind in FormatKind if kind is not FormatKind.TOOL_CALLS)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    kind: FormatKind
    value: str | tuple[str, ...]  # schema as JSON, regex or grammar; the choices; "" of any object
    field: str  # that an error names
    behind: BehindReasoning | None = None


def grammar_of(wanted: OutputFormat) -> str:
    """The grammar's text, which may be wrong yet. Raises GrammarError for what has none."""
    if sum(map(len, wanted.value)) > GRAMMAR_BYTES_MAX:
        raise GrammarError(_TOO_LONG)
    whole = "".join(wanted.value)
    _check_characters(whole)
    _check_multiples(whole)
    match wanted.kind, wanted.value:
        case FormatKind.CHOICE, tuple(choices):
            grammar = _choice_grammar(choices)
        case FormatKind.JSON_OBJECT, _:
            grammar = _json_grammar(ANY_OBJECT)
        case FormatKind.JSON, str(schema):
            grammar = _json_grammar(schema)
        case FormatKind.REGEX, str(regex):
            grammar = LLMatcher.grammar_from_regex(_ascii_classes(_some(regex, "regex")))
        case FormatKind.TOOL_CALLS, str(text):
            grammar = LLMatcher.grammar_from_lark(text)
        case _, str(text):
            grammar = LLMatcher.grammar_from_lark(_lark(_some(text, "grammar")))
        case _:
            raise AssertionError(wanted)
    if wanted.behind is not None:
        grammar = wanted.behind.grammar(grammar)
    if len(grammar.encode()) > GRAMMAR_BYTES_MAX:
        raise GrammarError(_TOO_LONG)
    return grammar


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError("it has half of a surrogate pair") from None


def _check_multiples(text: str) -> None:
    """The library builds an automaton with as many states as the number has units; no limit of its own stops it."""
    common = 1
    for found in _MULTIPLE.findall(_UNICODE_ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), text)):
        sign, digits, exponent = Decimal(found).normalize().as_tuple()
        size = abs(int(exponent)) + len(digits)
        units = int("".join(map(str, digits))) * 10 ** max(int(exponent), 0) if size <= _MULTIPLE_DIGITS else 0
        if not 0 < units <= _MULTIPLE_MAX or sign:
            raise GrammarError(f"multipleOf {found[:40]}: it may have {_MULTIPLE_MAX} units of its last digit at most")
        common = lcm(common, units)
    if common > _MULTIPLE_MAX:
        raise GrammarError(f"all multipleOf together: their common multiple may be {_MULTIPLE_MAX} units at most")


def _some(text: str, what: str) -> str:
    if not text:
        raise GrammarError(f"the {what} is empty")
    return text


def json_schema(text: str) -> dict[str, Any]:
    """What a schema that a client sent says about values; classes in patterns as in regexes. Raises GrammarError."""
    try:
        parsed: Any = _read_schema(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise GrammarError("the schema must be an object")
    if "x-guidance" in parsed:
        raise GrammarError("x-guidance is not taken from a schema")
    return parsed


def _read_schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_read_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    read: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "pattern" and isinstance(value, str):
            read[keyword] = _ascii_classes(value)
        elif keyword in _BY_NAME and isinstance(value, dict):
            names = map(_ascii_classes, value) if keyword == "patternProperties" else value
            read[keyword] = dict(zip(names, map(_read_schema, value.values()), strict=True))
        elif keyword not in _ANNOTATIONS:
            read[keyword] = value if keyword in _DATA else _read_schema(value)
    return read


def check_counts(schema: dict[str, Any]) -> None:
    """The library counts a name that is written twice as two; names that are required are written once.

    Raises GrammarError where an answer with too few of them could pass.
    """
    left: list[Any] = [schema]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        if not isinstance(each, dict):
            continue
        least, required = each.get("minProperties"), each.get("required")
        most = 1 + (len(set(map(str, required))) if isinstance(required, list) else 0)
        if isinstance(least, int | float) and least > most:
            raise GrammarError(f"minProperties may be {most} at most, one more than there are required properties")
        for keyword, value in each.items():
            if keyword in _BY_NAME and isinstance(value, dict):
                left += value.values()
            elif keyword not in _DATA:
                left.append(value)


def _json_grammar(schema: str) -> str:
    parsed = json_schema(schema)
    check_counts(parsed)
    read = json.dumps(parsed)
    try:
        return LLMatcher.grammar_from_json_schema(read, overrides=JSON_LIBRARY_OPTIONS)
    except ValueError as error:  # Python's reader takes more than JSON has: NaN, half of a surrogate pair
        raise GrammarError(f"the schema is no JSON: {error}") from None


def _choice_grammar(choices: tuple[str, ...]) -> str:
    if not choices or not all(choices):
        raise GrammarError("there must be one choice at least, and none may be empty")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def _ascii_classes(regex: str) -> str:
    """With `\\d`, `\\w` and `\\s` meaning ASCII. Programs differ in how they read them: what is in the answer matches
    in each, so all that any of them leaves out is left out."""
    pieces, negated = [], [False]  # of each class that is open
    for piece in _REGEX_PIECE.findall(regex):
        if piece[0] == "[":
            negated.append(negated[-1] != piece.startswith("[^"))
        elif piece == "]" and len(negated) > 1:
            negated.pop()
        pieces.append((_LEFT_OUT if negated[-1] else _TAKEN).get(piece, piece))
    return "".join(pieces)


def _lark(grammar: str) -> str:
    """Lark as it is; llama.cpp's GBNF, with `::=`, in Lark."""
    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # whatever its reader stumbles over
        raise GrammarError(f"it is no GBNF: {error}") from None
