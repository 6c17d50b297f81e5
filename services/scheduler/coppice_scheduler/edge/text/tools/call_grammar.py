"""The grammar of an answer that calls tools: what may be written in a family's format, in llguidance's Lark.

    required, named       one call or several, and nothing else
    auto, strict tools    text, in which each call has arguments that follow its tool's schema
    auto, a form          calls, or an answer in the form

A marker that the tokenizer has as one token is that token here: its letters, one by one, are not what a model knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from coppice.grammar import GrammarError
from coppice_scheduler.edge.text.output_format import JSON_ESCAPES, check_counts, json_schema
from coppice_scheduler.edge.text.tools.formats import ARGUMENTS_MARKER, LLAMA3_JSON, MARKERS, NAME_PLACE, ToolFormat
from coppice_scheduler.edge.text.tools.tool import Tool, ToolUse
from coppice_scheduler.edge.text.tools.xml_arguments import ANY_TEXT, RULE, VALUE_RULE, XmlArguments, is_plain, without

TokenOf = Callable[[str], int | None]
# What the reader of calls without an opening takes for text: its first character is none that begins JSON.
_BLANK = r"[\s\x1c-\x1f]*"
_NO_BARE_CALL = rf"TEXT: /{_BLANK}[^{{\[\s\x1c-\x1f](.|\n)*/ & ~/{_BLANK}<\|python_tag\|>(.|\n)*/"
_ARGUMENTS = re.compile(rf"(?:{RULE}|{VALUE_RULE})(\d+)[_\d]*:")
_COMPLAINT = re.compile(r"at (\d+)\(\d+\): (.*?)(?: \d+ \| .*)?$", re.DOTALL)  # and the lines around it
_ABOUT_PROPERTIES = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf", "if"}
)
# As `tojson` of a chat template does it: a call that is sent back becomes the same tokens, and is found in the cache.
_AS_TEMPLATES_WRITE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": JSON_ESCAPES,
}


def can_be_bound(use: ToolUse, tool_format: ToolFormat) -> bool:
    """Whether calls of these tools have a grammar in the syntax of the family. Raises GrammarError."""
    xml = tool_format.xml
    if xml is None:
        return tool_format.is_json
    return all(is_plain(_parameters(tool), xml) for tool in use.allowed)


def format_for_grammar(use: ToolUse, tool_format: ToolFormat) -> ToolFormat:
    """A JSON schema says how JSON is written: calls that cannot be bound otherwise are forced as JSON. Raises
    GrammarError."""
    return tool_format if can_be_bound(use, tool_format) else LLAMA3_JSON


def calls_grammar(use: ToolUse, tool_format: ToolFormat, token_of: TokenOf, answer_schema: str | None = None) -> str:
    """Calls and nothing else, or an answer that a schema describes where there is one. Raises GrammarError."""
    writing = _Writing(tool_format, token_of)
    answer = "" if answer_schema is None else " | answer"
    lines = [f"start: calls{answer}", *writing.calls(use)]
    if answer_schema is not None:
        lines.append(f"answer: %json {_schema_text(json_schema(answer_schema), is_strict=True)}")
    return "\n".join(lines)


def text_grammar(use: ToolUse, tool_format: ToolFormat, token_of: TokenOf) -> str:
    """Any text, with calls where the format has them. Raises GrammarError."""
    writing = _Writing(tool_format, token_of)
    if tool_format.is_bare:
        return "\n".join(["start: calls | TEXT?", _NO_BARE_CALL, *writing.calls(use)])
    opens = json.dumps(tool_format.opens)
    token = token_of(tool_format.opens)
    # Lazy: calls begin where the marker comes for the first time.
    begin = f"begin[lazy]: {ANY_TEXT} {opens}" if token is None else f"begin: TEXT? <[{token}]>"
    text = f"TEXT: {ANY_TEXT} & {without(opens)}"
    return "\n".join(["start: (begin calls)* TEXT?", begin, text, *writing.opened_calls(use)])


class _Writing:
    """Rules for calls in one format. The first, `calls`, is all that one answer has, or what one opening has."""

    def __init__(self, tool_format: ToolFormat, token_of: TokenOf) -> None:
        self._format = tool_format
        xml = "" if tool_format.xml is None else tool_format.xml.argument
        within = (marker for marker in MARKERS if marker in xml)
        self._markers = tuple(filter(None, (tool_format.opens, tool_format.closes, ARGUMENTS_MARKER, *within)))
        self._token_of = token_of

    def calls(self, use: ToolUse) -> list[str]:
        return [self._several(use, self._format.opening), *self._each(use, self._format.before)]

    def opened_calls(self, use: ToolUse) -> list[str]:
        """Behind the marker."""
        opens = self._format.opens
        if self._format.opening:
            opening = self._format.opening.removeprefix(opens)
            return [self._several(use, opening), *self._each(use, self._format.before)]
        return ["calls: call", *self._each(use, self._format.before.removeprefix(opens))]

    def _several(self, use: ToolUse, opening: str) -> str:
        more = "" if use.calls_max == 1 else f"({self._joined(self._format.between, 'call')})*"
        return f"calls: {self._joined(opening, 'call', more, self._format.closing)}"

    def _each(self, use: ToolUse, before: str) -> list[str]:
        tools = [(place, tool) for place, tool in enumerate(use.tools) if tool.name in use.names]
        lines = ["call: " + " | ".join(f"call_{place}" for place, _ in tools)]
        for place, tool in tools:
            written = self._joined(before.replace(NAME_PLACE, tool.name), f"{RULE}{place}", "", self._format.after)
            try:
                lines += [f"call_{place}: {written}", *self._arguments(place, tool)]
            except GrammarError as error:
                raise GrammarError(f"the parameters of {tool.name}: {error}") from None
        return lines

    def _arguments(self, place: int, tool: Tool) -> list[str]:
        parameters, xml = _parameters(tool), self._format.xml
        if xml is None:
            return [f"{RULE}{place}: %json {_schema_text(parameters, is_strict=tool.is_strict)}"]

        def described(schema: dict[str, Any]) -> str:
            return _schema_text(schema, is_strict=tool.is_strict)

        has_token = self._token_of(xml.value_closes) is not None
        return XmlArguments(xml, self._literal, described, has_token).rules(place, parameters)

    def _joined(self, before: str, rule: str, more: str = "", after: str = "") -> str:
        return " ".join(filter(None, (self._literal(before), rule, more, self._literal(after))))

    def _literal(self, text: str) -> str:
        """Markers that are tokens as tokens, the rest as text."""
        for marker in self._markers:
            before, found, after = text.partition(marker)
            token = self._token_of(marker) if found else None
            if token is not None:
                return " ".join(filter(None, (self._literal(before), f"<[{token}]>", self._literal(after))))
        return json.dumps(text) if text else ""


def what_is_wrong(grammar: str, problem: str) -> tuple[int | None, str]:
    """The place of the tool whose parameters the library complains of, if of any, and what it says of them."""
    found = _COMPLAINT.match(problem)
    if found is None:
        return None, problem
    lines = grammar.split("\n")
    number = int(found[1])
    rule = _ARGUMENTS.match(lines[number - 1]) if number <= len(lines) else None
    return int(rule[1]) if rule else None, found[2]


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of its arguments. Raises GrammarError."""
    return _closed(json_schema(tool.parameters))


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """A function takes the arguments that it names, unless its schema says otherwise."""
    said = parameters.keys() & _ABOUT_PROPERTIES
    return {"type": "object", **parameters, **({} if said else {"additionalProperties": False})}


def _schema_text(schema: dict[str, Any], *, is_strict: bool) -> str:
    """With options for the library. Where it is not strict, keywords that it does not know say nothing."""
    if is_strict:
        check_counts(schema)
    options = {**_AS_TEMPLATES_WRITE, "lenient": not is_strict}
    return json.dumps({**schema, "x-guidance": options}, separators=(",", ":"), ensure_ascii=False)
