"""Calls that are JSON: an object with name and arguments, or a name and then the arguments.

Models write more than they should, and it is taken: lists or single objects, keys in any order and more of them,
arguments as a text that is JSON, several calls behind one opening, no closing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from coppice_scheduler.edge.text.markers import SPACE_MAX, whole_characters
from coppice_scheduler.edge.text.tools.call_parser import CallParser, Found, Steps
from coppice_scheduler.edge.text.tools.formats import ARGUMENTS_MARKER, MISTRAL, ToolFormat
from coppice_scheduler.edge.text.tools.json_value import JsonValueEnd

STRING_MAX = 1024  # characters of a key or a name
PARSED_MAX = 1 << 16  # of arguments that are JSON within a string; longer ones are left as they are
_ARGUMENTS = ("arguments", "parameters")
_BETWEEN = re.compile(r"\s*[,;]?\s*")
_HEAD = re.compile(r"([^\s{\[]{1,256})\s{0,64}(\[[^{]{0,512})?(?=\{)")  # f{  f[ARGS]{  f[CALL_ID]x[ARGS]{
_PYTHON_TAG = "<|python_tag|>"


class JsonCalls(CallParser):
    def __init__(
        self,
        tool_format: ToolFormat,
        names: frozenset[str],
        new_id: Callable[[], str],
        calls_max: int | None = None,
        *,
        is_forced: bool = False,
    ) -> None:
        super().__init__(names, new_id, calls_max, is_forced=is_forced)
        self._opens = tool_format.opens
        self._has_named = ARGUMENTS_MARKER in tool_format.before or tool_format.opens == MISTRAL.opens
        self._closings = tuple(filter(None, ("}", "]", tool_format.closes)))

    def _steps(self) -> Steps:
        if not self._opens:
            if (yield from self._begins_with_call()):
                yield from self._calls_in_turn()
            if not self.is_done:
                yield from self._say_rest()
            return
        while (yield from self._text_before(self._opens)):
            yield from self._calls_in_turn()
            if self.is_done or self.is_open:
                return

    def _calls_in_turn(self) -> Steps:
        """From their opening on, to behind their closing."""
        while (yield from self._call()):
            self._end()
            if self.is_done or self.is_open or not (yield from self._another()):
                return

    # --- around calls ---------------------------------------------------------------------------------------------

    def _begins_with_call(self) -> Found:
        """By the first characters of the answer."""
        while True:
            first = yield from self._next()
            text = self._held[self._at :]
            if text.startswith(_PYTHON_TAG):
                return True
            if not text or not _PYTHON_TAG.startswith(text) or not (yield from self._more()):
                return first != "" and first in "{["

    def _another(self) -> Found:
        """Whether a call follows without an opening. Else what closes calls is dropped."""
        while True:
            between = _BETWEEN.match(self._held)
            assert between is not None
            rest = self._held[between.end() :]
            if rest or between.end() > SPACE_MAX:
                break
            if not (yield from self._more()):
                self._held = ""
                return False
        if rest[:1] == "{" and between.end() <= SPACE_MAX:
            self._held = rest
            return True
        for closing in self._closings:
            while (text := self._behind_space()) is not None and closing.startswith(text) and text != closing:
                if not (yield from self._more()):
                    self._held = "" if self._was_cut else self._held
                    return False
            if text is not None and text.startswith(closing):
                self._held = text[len(closing) :]
        return False

    def _behind_space(self) -> str | None:
        """What is held behind white space; None where there is too much of that."""
        text = self._held.lstrip()
        return text if len(self._held) - len(text) <= SPACE_MAX else None

    # --- one call -------------------------------------------------------------------------------------------------

    def _call(self) -> Found:
        """From its opening on. False: it is none; the opening is text then, and what follows is still to be read."""
        num_calls, opening_ends, self._ran_out = self.num_calls, 0, False
        first = yield from self._next()
        if self._opens and self._held.startswith(self._opens, self._at):
            opening_ends = self._at = self._at + len(self._opens)
            first = yield from self._next()
        elif self._held.startswith(_PYTHON_TAG, self._at):
            self._at += len(_PYTHON_TAG)
            first = yield from self._next()
        if first == "[":
            self._at += 1
            first = yield from self._next()
        if first == "{":
            yield from self._object()
        elif self._has_named and first:
            yield from self._named()
        if self.num_calls > num_calls:
            return True
        if self._ran_out and self._was_cut and opening_ends:
            self._held = ""
        self._say(opening_ends)
        return False

    def _named(self) -> Steps:
        while not (head := _HEAD.match(self._held, self._at)):
            is_long = len(self._held) - self._at > STRING_MAX
            if is_long or self._held.find("{", self._at) >= 0 or not (yield from self._more()):
                return
        if head[1] in self._names:
            self._begin(head[1])
            self._at = head.end()
            self._drop_read()
            yield from self._give_value()

    def _object(self) -> Steps:
        """An object that has the name and the arguments of a call; the call is begun when its name is known."""
        name, arguments = "", ""  # and whether arguments were given or kept
        is_begun = False
        self._at += 1
        while (key := (yield from self._key())) is not None:
            if key == "name" and not name:
                name = _as_text((yield from self._value(STRING_MAX)))
                if name not in self._names:
                    return
                # An object that is all of an answer is a call only if it has arguments.
                if arguments or self._opens:
                    is_begun = self._begin(name)
                    self._argue(_as_json(arguments))
            elif key in _ARGUMENTS and arguments in ("", "null"):
                is_begun = is_begun or bool(name and self._begin(name))
                if is_begun and self._held[self._at] == "{":
                    arguments = "{"
                    self._drop_read()
                    yield from self._give_value()
                else:
                    arguments = yield from self._value()
                    self._argue(_as_json(arguments) if is_begun and arguments != "null" and not self._ran_out else "")
            else:
                yield from self._value()
            if is_begun:
                self._drop_read()
        if is_begun and arguments in ("", "null") and not self._ran_out:
            self._argue("{}")

    def _key(self) -> Generator[None, None, str | None]:
        """The next key, with its value at `_at`; None behind the object, or where there is no key."""
        first = yield from self._next()
        if first == ",":
            self._at += 1
            first = yield from self._next()
        if first != '"':
            self._at += first == "}"
            return None
        key = _as_text((yield from self._value(STRING_MAX)))
        if (yield from self._next()) != ":":
            return None
        self._at += 1
        return key if (yield from self._next()) else None

    def _value(self, length_max: int | None = None) -> Generator[None, None, str]:
        """The text of the value at `_at`, to behind it; of one that does not end as much as there is."""
        begin, end = self._at, JsonValueEnd()
        while (found := end.find(self._held, self._at)) is None:
            self._at = len(self._held)
            if (length_max and self._at - begin > length_max) or not (yield from self._more()):
                return self._held[begin:]
        self._at = found
        return self._held[begin:found]

    def _give_value(self) -> Steps:
        """The value at `_at`, as arguments, while it comes."""
        end = JsonValueEnd()
        while (found := end.find(self._held, 0)) is None:
            self._argue(self._held)
            self._held = ""
            if not (yield from self._more()):
                return
        self._argue(self._held[:found])
        self._at = found
        self._drop_read()


def _as_text(value: str) -> str:
    """What a JSON string says; empty of anything else."""
    try:
        said = json.loads(value)
    except (ValueError, RecursionError):
        return ""
    return whole_characters(said) if isinstance(said, str) else ""


def _as_json(arguments: str) -> str:
    """Arguments as an object: some models write them as a string, or null for none."""
    if arguments.startswith('"') and len(arguments) <= PARSED_MAX:
        return _as_text(arguments) or "{}"
    return "" if arguments == "null" else arguments
