"""Where a JSON value ends, in text that comes in pieces."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,}\]]")


class JsonValueEnd:
    """Follows one value from its first character on. Nothing is checked but strings and brackets."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self._is_scalar: bool | None = None  # a number, true, false, null

    def find(self, text: str, at: int) -> int | None:
        """The place behind the value's end in `text[at:]`, which continues what was given before; None: not in it."""
        while at < len(text):
            if self._is_scalar is None:
                self._is_scalar = text[at] not in '"{['
            if self._is_scalar:
                end = _SCALAR_END.search(text, at)
                return end.start() if end else None
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_INSIDE if self._is_string else _OUTSIDE).search(text, at)
            if found is None:
                return None
            at = found.end()
            self._see(found[0])
            if not self._depth and not self._is_string:
                return at
        return None

    @property
    def is_in_string(self) -> bool:
        return self._is_string

    def _see(self, character: str) -> None:
        if character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_string = not self._is_string
        else:
            self._depth += 1 if character in "{[" else -1
