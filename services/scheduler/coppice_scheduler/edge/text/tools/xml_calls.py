"""Calls in XML, whose values are text or JSON by the schema of the tool: `<parameter=a>`, `<arg_key>a</arg_key>`.

Arguments are given as JSON, each when it is complete. A value that is to be JSON and is none is given as a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Any

from coppice_scheduler.edge.text.markers import whole_characters
from coppice_scheduler.edge.text.tools.call_parser import CallParser, Found, Steps
from coppice_scheduler.edge.text.tools.formats import ToolFormat
from coppice_scheduler.edge.text.tools.json_value import JsonValueEnd
from coppice_scheduler.edge.text.tools.tool import NAME

WAITS_MAX = 1024  # characters of a name or a key, with what is around it
_HEAD_BEGUN = re.compile(r"\s*+[\w.:/<=>-]*+\s*+<?+[/\w]*+", re.ASCII)
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as templates write them


class XmlCalls(CallParser):
    def __init__(
        self,
        tool_format: ToolFormat,
        texts: frozenset[tuple[str, str]],
        names: frozenset[str],
        new_id: Callable[[], str],
        calls_max: int | None = None,
    ) -> None:
        """`texts`: names of tools, each with one of its `text_arguments`."""
        super().__init__(names, new_id, calls_max)
        assert tool_format.xml is not None
        self._opens, xml = tool_format.opens, tool_format.xml
        self._head = re.compile(rf"\s*{xml.name_opens}({NAME.pattern})\s*{xml.name_closes}", re.ASCII)
        self._key = re.compile(rf"\s*{xml.key_opens}([^<>]+){xml.key_closes}")
        self._value_closes, self._space = xml.value_closes, xml.space
        self._closing_texts = xml.closings
        self._closings = tuple(re.compile(rf"\s*{re.escape(each)}") for each in xml.closings)
        self._texts = texts

    def _steps(self) -> Steps:
        while (yield from self._text_before(self._opens)):
            if (yield from self._call()):
                self._end()
                if self.is_done or self.is_open:
                    return

    def _call(self) -> Found:
        """From its opening on. False: it is none; the opening is text then."""
        self._ran_out = False
        opening_ends = self._at = self._held.index(self._opens) + len(self._opens)
        head = yield from self._match(self._head)
        if head is None or head[1] not in self._names:
            if self._ran_out and self._was_cut:
                self._held = ""
            self._say(opening_ends)
            return False
        self._begin(head[1])
        num_arguments = 0
        self._ran_out = False
        key = yield from self._match(self._key, *self._closings)
        while key is not None and key.re is self._key:
            is_text = (head[1], key[1]) in self._texts
            value = yield from self._value(is_text=is_text)
            if value is None:
                return True
            opening = ", " if num_arguments else "{"
            said = json.dumps(value, ensure_ascii=False) if is_text else _as_json(value)
            self._argue(f"{opening}{json.dumps(key[1], ensure_ascii=False)}: {said}")
            num_arguments += 1
            self._drop_read()
            key = yield from self._match(self._key, *self._closings)
        if not self._ran_out:
            self._argue("}" if num_arguments else "{}")
        if key is not None:
            yield from self._close(key.re)
        return True

    def _close(self, found: re.Pattern[str]) -> Steps:
        """Drops the closings behind the one that was found. The call is complete without them."""
        for closing in self._closings[self._closings.index(found) + 1 :]:
            yield from self._match(closing)
        if self._was_cut and any(each.startswith(self._held[self._at :].strip()) for each in self._closing_texts):
            self._at = len(self._held)
        self._ran_out = False

    def _match(self, *patterns: re.Pattern[str]) -> Generator[None, None, re.Match[str] | None]:
        """The first of `patterns` that is at `_at`, to behind it. None: none is, among as much as may wait."""
        while True:
            for pattern in patterns:
                if found := pattern.match(self._held, self._at):
                    self._at = found.end()
                    return found
            rest = self._held[self._at :]
            may_come = _HEAD_BEGUN.fullmatch(rest) if self._head in patterns else rest.lstrip()[:1] in ("", "<")
            if len(rest) > WAITS_MAX or not may_come or not (yield from self._more()):
                return None

    def _value(self, *, is_text: bool) -> Generator[None, None, str | None]:
        """The text of the value at `_at`, to behind its closing; None where it has none.

        Within a string of JSON a closing is text. A value that is a text has no strings: its first closing counts.
        """
        begin = fed = searched = self._at
        first, string = -1, _OpenString()
        while True:
            end = self._held.find(self._value_closes, searched)
            if end >= 0:
                first = end if first < 0 else first
                searched = end + len(self._value_closes)
                string.feed(self._held[fed:end])
                fed = end
                if is_text or not string.is_open:
                    self._at = searched
                    return self._without_space(self._held[begin:end])
                continue
            searched = max(searched, len(self._held) - len(self._value_closes) + 1)
            if not (yield from self._more()):
                if first < 0:
                    return None
                self._ran_out = False
                self._at = first + len(self._value_closes)
                return self._without_space(self._held[begin:first])

    def _without_space(self, value: str) -> str:
        return whole_characters(value.removeprefix(self._space).removesuffix(self._space))


def text_arguments(parameters: str) -> frozenset[str]:
    """Of a tool: those whose values are strings, which are written without quotes."""
    schema: Any = json.loads(parameters)
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    items = properties.items() if isinstance(properties, dict) else ()
    return frozenset(name for name, each in items if isinstance(each, dict) and is_text(each))


def listed_values(schema: dict[str, Any]) -> Any:
    """Those that a schema lists, as it says them; None where it lists none."""
    return schema.get("enum", [schema["const"]] if "const" in schema else None)


def is_text(schema: dict[str, Any]) -> bool:
    """Whether a value that this describes is a string, and written without quotes."""
    values = listed_values(schema)
    if "type" not in schema and isinstance(values, list):
        return bool(values) and all(isinstance(value, str) for value in values)
    return schema.get("type") in ("string", ["string"])


class _OpenString:
    """Whether text, which comes in pieces, is JSON that stops within a string: there a closing is text."""

    def __init__(self) -> None:
        self._end = JsonValueEnd()
        self._may_be: bool | None = None  # an object or a list that has not ended

    def feed(self, text: str) -> None:
        if self._may_be is None and (text := text.lstrip()):
            self._may_be = text[0] in "{["
        if self._may_be:
            self._may_be = self._end.find(text, 0) is None

    @property
    def is_open(self) -> bool:
        return bool(self._may_be) and self._end.is_in_string


def _as_json(value: str) -> str:
    """A value that is JSON as it is; else as a text."""
    text = value.strip()
    try:
        json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return PYTHON_WORDS.get(text) or json.dumps(value, ensure_ascii=False)
    return text


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")
