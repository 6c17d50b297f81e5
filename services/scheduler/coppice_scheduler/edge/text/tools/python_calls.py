"""Calls in Python's syntax, instead of text: `[f(a=1, b="x"), g()]`.

Arguments are given as JSON, each when it is complete.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator

from coppice_scheduler.edge.text.markers import whole_characters
from coppice_scheduler.edge.text.tools.call_parser import CallParser, Found, Steps
from coppice_scheduler.edge.text.tools.tool import NAME

HEAD_MAX = 256  # characters of a name
VALUE_MAX = 1 << 14  # of an argument that is read as Python; a longer one is given as text, unless it is a string
_TRIPLE = '"""'
_HEAD = re.compile(rf"({NAME.pattern})\s*\(", re.ASCII)
_HEAD_BEGUN = re.compile(rf"(?:{NAME.pattern})?\s*", re.ASCII)
_KEYWORD = re.compile(r"([A-Za-z_]\w*)\s*=", re.ASCII)
_MARKS = re.compile(r"""["'()\[\]{},]""")
_JSON_WORDS = ("true", "false", "null")


class PythonCalls(CallParser):
    def _steps(self) -> Steps:
        if (yield from self._next()) == "[":
            self._at += 1
            while (yield from self._call()):
                self._end()
                if self.is_done or self.is_open:
                    return
                mark = yield from self._next()
                self._at += mark != "" and mark in ",]"
                if mark != ",":
                    if mark in ("", "]"):
                        yield from self._next()  # white space at the end
                        self._drop_read()
                    break
        yield from self._say_rest()

    def _call(self) -> Found:
        self._ran_out = False
        yield from self._next()
        head = yield from self._match(_HEAD)
        if head is None or head[1] not in self._names:
            return False
        self._begin(head[1])
        self._at = head.end()
        num_arguments = 0
        while (keyword := (yield from self._keyword())) is not None:
            value = yield from self._value()
            if self._ran_out:
                return True
            opening = ", " if num_arguments else "{"
            self._argue(f"{opening}{json.dumps(keyword)}: {_as_json(value)}")
            num_arguments += 1
            self._drop_read()
        if not self._ran_out:
            self._argue("}" if num_arguments else "{}")
        return True

    def _keyword(self) -> Generator[None, None, str | None]:
        """The name of the next argument, with its value at `_at`; None behind the call."""
        first = yield from self._next()
        if first == ",":
            self._at += 1
            first = yield from self._next()
        if first == ")":
            self._at += 1
            return None
        found = yield from self._match(_KEYWORD)
        if found is None:
            return None
        self._at = found.end()
        return found[1] if (yield from self._next()) else None

    def _match(self, pattern: re.Pattern[str]) -> Generator[None, None, re.Match[str] | None]:
        """Of a name and what follows it, at `_at`."""
        while not (found := pattern.match(self._held, self._at)):
            rest = self._held[self._at :]
            if not _HEAD_BEGUN.fullmatch(rest) or len(rest) > HEAD_MAX or not (yield from self._more()):
                return None
        return found

    def _value(self) -> Generator[None, None, str]:
        """The text of an expression, up to the comma or the bracket behind it."""
        begin, depth = self._at, 0
        while True:
            mark = _MARKS.search(self._held, self._at)
            if mark is None:
                self._at = len(self._held)
                if not (yield from self._more()):
                    break
            elif mark[0] in "\"'":
                yield from self._string(mark.start())
            elif not depth and mark[0] in ",)]}":
                self._at = mark.start()
                break
            else:
                self._at = mark.end()
                depth += 1 if mark[0] in "([{" else -1 if mark[0] in ")]}" else 0
        return self._held[begin : self._at]

    def _string(self, at: int) -> Steps:
        """To behind the string whose first quote is at `at`."""
        while len(self._held) - at < len(_TRIPLE) and (yield from self._more()):
            pass
        quote = self._held[at]
        num_quotes = 3 if self._held.startswith(quote * 3, at) else 1
        self._at = at + num_quotes
        is_escaped, in_a_row = False, 0
        while True:
            while self._at < len(self._held):
                character = self._held[self._at]
                self._at += 1
                in_a_row = in_a_row + 1 if character == quote and not is_escaped else 0
                if in_a_row == num_quotes:
                    return
                is_escaped = character == "\\" and not is_escaped
            if not (yield from self._more()):
                return


def _as_json(expression: str) -> str:
    """A literal as JSON. What is none, or has no JSON, is given as a text."""
    text = expression.strip()
    if text in _JSON_WORDS:
        return text
    try:
        if len(text) > VALUE_MAX and text[0] not in "\"'":
            raise ValueError
        return whole_characters(json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
