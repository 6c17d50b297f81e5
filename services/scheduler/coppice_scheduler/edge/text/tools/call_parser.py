"""Text of an answer to what it says and what it calls, while it comes.

    text --feed--> CallParser --take--> text of the answer, pieces of calls

What was given is never taken back, so a stream and a whole answer have the same. A call counts from where its name is
known and is that of a tool; what looked like a call and is none stays text. Arguments are given as the model wrote
them: JSON in general, and whether it is what the tool wants the client must see.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import groupby

from coppice_scheduler.edge.text.markers import SPACE_MAX
from coppice_scheduler.edge.text.tools.tool import ToolCall

HELD_MAX = 1 << 18  # characters that wait until it is known what they are
_SLICE = 64  # characters
_SPACE = re.compile(r"\s*")

Steps = Generator[None, None, None]
Found = Generator[None, None, bool]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of one call. The first has its id and its name."""

    index: int  # of the call in its answer
    arguments: str  # what comes next of the JSON
    call_id: str = ""
    name: str = ""


def joined_calls(pieces: Iterable[CallDelta]) -> list[ToolCall]:
    """The calls of one answer, from their pieces in order."""
    calls: list[tuple[CallDelta, list[str]]] = []
    for piece in pieces:
        if piece.name:
            calls.append((piece, []))
        calls[piece.index][1].append(piece.arguments)
    return [ToolCall(first.call_id, first.name, "".join(arguments)) for first, arguments in calls]


class CallParser:
    """Of one answer. A subclass reads one syntax: `_steps` reads `_held` from `_at` on, and asks for more of it."""

    def __init__(
        self,
        names: frozenset[str],
        new_id: Callable[[], str],
        calls_max: int | None = None,
        *,
        is_forced: bool = False,
    ) -> None:
        """`names`: of the tools. After `calls_max` calls the answer is over.

        `is_forced`: it is calls and nothing else, so what is no call is the syntax around them.
        """
        self._names = names
        self._new_id = new_id
        self._calls_max = calls_max
        self._is_forced = is_forced
        self._held = ""  # what was given neither as text nor as a call yet
        self._at = 0  # what of it was read
        self._has_ended = False
        self._was_cut = False  # before the model had ended
        self._ran_out = False  # of text, since the latest call began
        self._texts: list[str] = []
        self._calls: list[CallDelta] = []
        self.num_calls = 0
        self.is_open = False  # the latest call is not complete
        self.is_done = False  # as many calls as there may be are complete; nothing more is read
        self._running = self._steps()

    @property
    def may_be_done(self) -> bool:
        return self._calls_max is not None

    def feed(self, text: str) -> None:
        # In slices: what waits stays short, and limits are met at about the same place however text comes.
        for at in range(0, len(text), _SLICE):
            if self.is_done:
                return
            self._held += text[at : at + _SLICE]
            next(self._running, None)

    def flush(self, *, was_cut: bool = False) -> None:
        """The answer has ended. Where it was cut, an opening that was begun is dropped."""
        if not self.is_done and not self._has_ended:
            self._has_ended, self._was_cut = True, was_cut
            next(self._running, None)

    def take(self) -> tuple[str, tuple[CallDelta, ...]]:
        """What was found since the last time: of each call one piece at most."""
        text, calls = "".join(self._texts), tuple(map(_joined, groupby(self._calls, lambda piece: piece.index)))
        self._texts.clear()
        self._calls.clear()
        return text, calls

    def _steps(self) -> Steps:
        raise NotImplementedError

    # --- reading --------------------------------------------------------------------------------------------------

    def _more(self) -> Found:
        """Waits for more text. False: there is none, or too much waits already."""
        if self._has_ended or len(self._held) > HELD_MAX:
            self._ran_out = True
            return False
        yield
        return True

    def _next(self) -> Generator[None, None, str]:
        """The next character that is no white space, at `_at` then; "" at the end. Much white space ends at a space."""
        begin = self._at
        while True:
            found = _SPACE.match(self._held, self._at)
            assert found is not None
            self._at = found.end()
            if self._at - begin > SPACE_MAX:
                self._at = begin + SPACE_MAX
            if self._at < len(self._held):
                return self._held[self._at]
            if not (yield from self._more()):
                return ""

    def _drop_read(self) -> None:
        self._held, self._at = self._held[self._at :], 0

    # --- giving ---------------------------------------------------------------------------------------------------

    def _say(self, length: int) -> None:
        """The first characters of what is held are text."""
        if length and not self._is_forced:
            self._texts.append(self._held[:length])
        self._held, self._at = self._held[length:], 0

    def _say_rest(self) -> Steps:
        while True:
            self._say(len(self._held))
            if not (yield from self._more()):
                return

    def _begin(self, name: str) -> bool:
        self._calls.append(CallDelta(self.num_calls, "", self._new_id(), name))
        self.num_calls += 1
        self.is_open = True
        return True

    def _argue(self, text: str) -> None:
        """More of the arguments of the call that was begun."""
        if text:
            self._calls.append(CallDelta(self.num_calls - 1, text))

    def _end(self) -> None:
        """Of the call that was begun."""
        self._drop_read()
        self.is_open = self._ran_out
        self.is_done = not self.is_open and self.num_calls == self._calls_max


def _joined(pieces: tuple[int, Iterable[CallDelta]]) -> CallDelta:
    """Pieces of one call."""
    index, (first, *others) = pieces
    arguments = "".join((first.arguments, *(piece.arguments for piece in others)))
    return CallDelta(index, arguments, first.call_id, first.name)
