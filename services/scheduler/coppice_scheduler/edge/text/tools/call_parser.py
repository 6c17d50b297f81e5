"""Text of an answer to what it says and what it calls, while it comes.

    text --feed--> CallParser --take--> text of the answer and pieces of calls, in the order in which they were written

What was given is never taken back, so a stream and a whole answer have the same. A call counts from where its name is
known and is that of a tool; what looked like a call and is none stays text. Arguments are given as the model wrote
them: JSON in general, and whether it is what the tool wants the client must see.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from itertools import groupby

from coppice_scheduler.edge.text.markers import SPACE_MAX, length_begun
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


@dataclass(frozen=True, slots=True)
class Said:
    """Text that is of no call, as it was written."""

    text: str
    end: int  # characters that the model wrote, up to behind it


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
        self._num_fed = 0  # characters; what is held are the last of them
        self._at = 0  # what of it was read
        self._has_ended = False
        self._was_cut = False  # before the model had ended
        self._ran_out = False  # of text, since the latest call began
        self._found: list[Said | CallDelta] = []
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
            self._num_fed += min(_SLICE, len(text) - at)
            next(self._running, None)

    def flush(self, *, was_cut: bool = False) -> None:
        """The answer has ended. Where it was cut, an opening that was begun is dropped."""
        if not self.is_done and not self._has_ended:
            self._has_ended, self._was_cut = True, was_cut
            next(self._running, None)

    def take(self) -> tuple[Said | CallDelta, ...]:
        """What was found since the last time, in order: of each call one piece at most."""
        found = tuple(_joined([*run]) for _, run in groupby(self._found, _call_of))
        self._found.clear()
        return found

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
        said, self._held, self._at = self._held[:length], self._held[length:], 0
        if said and not self._is_forced:
            self._found.append(Said(said, self._num_fed - len(self._held)))

    def _text_before(self, opens: str) -> Found:
        """Gives text up to where `opens` stands. White space before it is dropped with it. False: it does not come."""
        while True:
            at = self._held.find(opens)
            end = at if at >= 0 else len(self._held) - length_begun(self._held, opens)
            self._say(max(len(self._held[:end].rstrip()), end - SPACE_MAX))
            if at >= 0:
                return True
            if not (yield from self._more()):
                if not self.num_calls or (self._held.strip() and not self._was_cut):
                    self._say(len(self._held))
                return False

    def _say_rest(self) -> Steps:
        while True:
            self._say(len(self._held))
            if not (yield from self._more()):
                return

    def _begin(self, name: str) -> bool:
        self._found.append(CallDelta(self.num_calls, "", self._new_id(), name))
        self.num_calls += 1
        self.is_open = True
        return True

    def _argue(self, text: str) -> None:
        """More of the arguments of the call that was begun."""
        if text:
            self._found.append(CallDelta(self.num_calls - 1, text))

    def _end(self) -> None:
        """Of the call that was begun."""
        self._drop_read()
        self.is_open = self._ran_out
        self.is_done = not self.is_open and self.num_calls == self._calls_max


def _call_of(found: Said | CallDelta) -> int | None:
    return found.index if isinstance(found, CallDelta) else None


def _joined(pieces: list[Said | CallDelta]) -> Said | CallDelta:
    """Pieces of one call, or of text without a call between them."""
    first, last = pieces[0], pieces[-1]
    if isinstance(first, CallDelta):
        arguments = "".join(piece.arguments for piece in pieces if isinstance(piece, CallDelta))
        return CallDelta(first.index, arguments, first.call_id, first.name)
    assert isinstance(last, Said), "pieces of one kind"
    return Said("".join(piece.text for piece in pieces if isinstance(piece, Said)), last.end)
