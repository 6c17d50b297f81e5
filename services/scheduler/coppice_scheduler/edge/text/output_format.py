"""The form that an answer must have: what a client asks for, to the text of a grammar."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from coppice.grammar import GRAMMAR_BYTES_MAX, GrammarError

# Between two tokens of JSON. A model that is made to go on writes whitespace without end where it may.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
_ASCII = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]", r"\s": r"[\t\n\f\r ]"}  # a class may stand in another one
_REGEX_PIECE = re.compile(r"\\.|.", re.DOTALL)
_ANY_OBJECT = '{"type":"object"}'
_TOO_LONG = f"it is longer than {GRAMMAR_BYTES_MAX >> 10} KiB"
MAX_FORMAT_CHOICES = 1024


class FormatKind(StrEnum):
    JSON_OBJECT = "json_object"
    JSON = "json"  # that a schema describes
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class OutputFormat:
    kind: FormatKind
    value: str | tuple[str, ...]  # schema as JSON, regex or grammar; the choices; "" of any object
    field: str  # that an error names


def grammar_of(wanted: OutputFormat) -> str:
    """The grammar's text, which may be wrong yet. Raises GrammarError for what has none."""
    if sum(map(len, wanted.value)) > GRAMMAR_BYTES_MAX:
        raise GrammarError(_TOO_LONG)
    match wanted.kind, wanted.value:
        case FormatKind.CHOICE, tuple(choices):
            grammar = _choice_grammar(choices)
        case FormatKind.JSON_OBJECT, _:
            grammar = _json_grammar(_ANY_OBJECT)
        case FormatKind.JSON, str(schema):
            grammar = _json_grammar(schema)
        case FormatKind.REGEX, str(regex):
            grammar = LLMatcher.grammar_from_regex(_ascii_classes(_some(regex, "regex")))
        case _, str(text):
            grammar = LLMatcher.grammar_from_lark(_lark(_some(text, "grammar")))
        case _:
            raise AssertionError(wanted)
    if len(grammar.encode("utf-8", "replace")) > GRAMMAR_BYTES_MAX:
        raise GrammarError(_TOO_LONG)
    return grammar


def _some(text: str, what: str) -> str:
    if not text:
        raise GrammarError(f"the {what} is empty")
    return text


def _json_grammar(schema: str) -> str:
    try:
        parsed: Any = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is no JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise GrammarError("the schema must be an object")
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE, "lenient": False})


def _choice_grammar(choices: tuple[str, ...]) -> str:
    if not choices or not all(choices):
        raise GrammarError("there must be one choice at least, and none may be empty")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def _ascii_classes(regex: str) -> str:
    """With `\\d`, `\\w` and `\\s` meaning ASCII: what matches then matches in any program that reads the regex."""
    return "".join(_ASCII.get(piece, piece) for piece in _REGEX_PIECE.findall(regex))


def _lark(grammar: str) -> str:
    """Lark as it is; llama.cpp's GBNF, with `::=`, in Lark."""
    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # whatever its reader stumbles over
        raise GrammarError(f"it is no GBNF: {error}") from None
