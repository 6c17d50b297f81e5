"""Arguments in XML as rules of llguidance's Lark: each in its tags, in the order in which the schema names them.

    args_0: arg_0_0 arg_0_1?                                        the second is optional
    arg_0_0: "<parameter=city>" "\\n" text_0_0 "\\n"                 a text ends where its closing comes first
    arg_0_1: "<parameter=days>" "\\n" json_0_1_0 "\\n</parameter>" "\\n"

Texts have no quotes there, so a schema that says more of a text than its choices has no such rules, nor has one whose
names are not all known. Such calls are written as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from coppice_scheduler.edge.text.tools.formats import KEY_PLACE, VALUE_PLACE, XmlSyntax
from coppice_scheduler.edge.text.tools.xml_calls import PYTHON_WORDS, is_text, listed_values

# Names of rules of a tool's arguments begin so, and go on with its place.
RULE, VALUE_RULE = "args_", "json_"
ANY_TEXT = r"/(.|\n)*/"
_SAID_OF_TOOLS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
)
_SAID_OF_TEXTS = frozenset({"type", "enum", "const", "default"})
_SHARED = ("$defs", "definitions")  # what a value's schema may refer to
_NO_TEXTS = frozenset({"integer", "number", "boolean", "null", "object", "array"})
_NOTHING = '""'
_IN_PYTHON = {word: python for python, word in PYTHON_WORDS.items()}
# A string of JSON without what begins a closing, which the reader of calls would take for one.
_QUOTED = r'/"([^"\\<\x00-\x1f]|\\["\\\/bfnrt]|\\u[0-9a-cA-CefEF][0-9a-fA-F]{3})*"/'


@dataclass(frozen=True, slots=True)
class _Choice:
    """One of what a value may be: a text of these letters, a string in quotes, or what a schema describes."""

    letters: str | None = None
    schema: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Argument:
    name: str
    is_required: bool
    choices: tuple[_Choice, ...] | None  # None: any text


class XmlArguments:
    """`literal` and `described` write texts and schemas as Lark, `has_token` tells of markers that are one token."""

    def __init__(
        self,
        syntax: XmlSyntax,
        literal: Callable[[str], str],
        described: Callable[[dict[str, Any]], str],
        has_token: bool,
    ) -> None:
        self._syntax = syntax
        self._before, _, self._after = syntax.argument.partition(VALUE_PLACE)
        self._behind = self._after.removeprefix(syntax.space).removeprefix(syntax.value_closes)
        self._literal = literal
        self._described = described
        self._has_token = has_token

    def rules(self, place: int, schema: dict[str, Any]) -> list[str]:
        """Of the tool at this place, whose schema `is_plain`. The first rule is `args_` and the place."""
        arguments = _arguments(schema, self._syntax)
        assert arguments is not None
        names = [f"arg_{place}_{number}" for number in range(len(arguments))]
        parts = (name if each.is_required else f"{name}?" for name, each in zip(names, arguments, strict=True))
        lines = [f"{RULE}{place}: {' '.join(parts) or _NOTHING}"]
        for number, argument in enumerate(arguments):
            lines += self._argument(f"{place}_{number}", argument)
        return lines

    def _argument(self, number: str, argument: _Argument) -> Iterator[str]:
        before = self._literal(self._before.replace(KEY_PLACE, argument.name))
        if argument.choices is None:
            yield f"arg_{number}: {before} text_{number} {self._literal(self._behind)}"
            yield from self._text(number)
            return
        ways = []
        for choice_number, choice in enumerate(argument.choices):
            name = f"{VALUE_RULE}{number}_{choice_number}"
            if choice.letters is not None:
                ways.append(self._literal(choice.letters))
            elif choice.schema is not None:
                ways.append(name)
                yield f"{name}: %json {self._described(choice.schema)}"
            else:
                ways.append(f"QUOTED_{number}")
                yield f"QUOTED_{number}: {_QUOTED}"
        yield f"arg_{number}: {before} ({' | '.join(ways)}) {self._literal(self._after)}"

    def _text(self, number: str) -> Iterator[str]:
        """Any text to its first closing, with that."""
        syntax = self._syntax
        closes = json.dumps(syntax.value_closes)
        yield f"TEXT_{number}: /(.|\\n)*{json.dumps(syntax.space)[1:-1]}/ & {without(closes)}"
        if self._has_token:
            may_be = "?" if not syntax.space else ""
            yield f"text_{number}: TEXT_{number}{may_be} {self._literal(syntax.value_closes)}"
        else:
            yield f"text_{number}[lazy]: TEXT_{number} {closes}"


def without(literal: str) -> str:
    """A terminal: any text that has no such literal in it."""
    return f"~({ANY_TEXT} {literal} {ANY_TEXT})"


def is_plain(schema: dict[str, Any], syntax: XmlSyntax) -> bool:
    """Whether a schema of arguments has rules here."""
    return _arguments(schema, syntax) is not None


def _arguments(schema: dict[str, Any], syntax: XmlSyntax) -> tuple[_Argument, ...] | None:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not schema.keys() <= _SAID_OF_TOOLS or schema.get("type", "object") != "object":
        return None
    if schema.get("additionalProperties", False) is not False or not isinstance(properties, dict):
        return None
    if not isinstance(required, list) or not all(name in properties for name in required):
        return None
    shared = {name: schema[name] for name in _SHARED if name in schema}
    arguments = []
    for name, said in properties.items():
        if not name or "<" in name or ">" in name or not isinstance(said, dict):
            return None
        if is_text(said) and said.keys() <= {"type", "default"}:
            choices = None
        else:
            found = list(_choices(said, shared, syntax))
            if not found or None in found:
                return None
            choices = tuple(choice for choice in found if choice is not None)
        arguments.append(_Argument(name, name in required, choices))
    return tuple(arguments)


def _choices(schema: Any, shared: dict[str, Any], syntax: XmlSyntax) -> Iterator[_Choice | None]:
    """All that a value may be; None among them: something that has no rule."""
    if not isinstance(schema, dict):
        yield None
        return
    values = listed_values(schema)
    of_text = is_text(schema)
    if isinstance(values, list):
        said_else = schema.keys() - _SAID_OF_TEXTS
        for value in values if not said_else else [None]:
            yield _Choice(letters=_written(value, syntax, of_text=of_text)) if _may_be(value, syntax, of_text) else None
    elif schema.keys() <= {"anyOf", "default"} and isinstance(schema.get("anyOf"), list):
        for branch in schema["anyOf"]:
            yield from _choices(branch, shared, syntax)
    elif isinstance(schema.get("type"), list):
        for kind in schema["type"]:
            yield from _choices({**schema, "type": kind}, shared, syntax)
    elif schema.get("type") == "string":
        yield _Choice() if schema.keys() <= {"type", "default"} else None
    elif schema.get("type") in ("boolean", "null") and syntax.has_python_words:
        words = ("True", "False") if schema["type"] == "boolean" else ("None",)
        yield from (_Choice(letters=word) for word in words)
    else:
        yield _Choice(schema={**shared, **schema}) if schema.get("type") in _NO_TEXTS else None


def _may_be(value: Any, syntax: XmlSyntax, of_text: bool) -> bool:
    return not (of_text and isinstance(value, str) and syntax.value_closes in value)


def _written(value: Any, syntax: XmlSyntax, *, of_text: bool) -> str:
    if of_text and isinstance(value, str):
        return value
    text = json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
    return _IN_PYTHON.get(text, text) if syntax.has_python_words else text
