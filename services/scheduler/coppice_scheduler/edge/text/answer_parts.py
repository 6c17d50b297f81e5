"""The parts of an answer, while it comes: what was thought, what is said, what is called."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from coppice_scheduler.edge.text.reasoning.parser import ReasoningParser
from coppice_scheduler.edge.text.tools.call_parser import CallDelta, CallParser, Said


class PartKind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(frozen=True, slots=True)
class Part:
    """What comes next of an answer, of one kind."""

    kind: PartKind
    text: str  # of a call its arguments
    end: int = 0  # of text and reasoning: characters that the model wrote, up to behind it
    call: CallDelta | None = None  # of which it is


class AnswerParts:
    """Takes reasoning out of the text first, then calls out of what is left. Parts come as the model wrote them."""

    def __init__(self, reasoning: ReasoningParser | None, calls: CallParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._thought: list[str] = []
        self._said: list[str] = []  # where nothing may be called
        self._num_fed = 0  # characters
        self._num_said = 0  # of them, which are behind the reasoning: all that follow are

    @property
    def is_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_inside

    @property
    def counts_tokens(self) -> bool:
        """Whether it matters at which token something was found: where reasoning or the answer ends."""
        is_thinking = self._reasoning is not None and not self._reasoning.is_over
        return is_thinking or (self._calls is not None and self._calls.may_be_done)

    @property
    def is_done(self) -> bool:
        """As many calls as there may be are complete."""
        return self._calls is not None and self._calls.is_done

    @property
    def ends_with_calls(self) -> bool:
        """All of them are complete."""
        return self._calls is not None and self._calls.num_calls > 0 and not self._calls.is_open

    def feed(self, text: str) -> None:
        self._num_fed += len(text)
        thought, said = self._reasoning.feed(text) if self._reasoning is not None else ("", text)
        self._add(thought, said)

    def flush(self, *, was_cut: bool) -> None:
        """The answer has ended, or was cut by a limit or a stop string."""
        if self._reasoning is not None:
            self._add(*self._reasoning.flush())
        if self._calls is not None:
            self._calls.flush(was_cut=was_cut)

    def take(self) -> tuple[Part, ...]:
        """What was found since the last time, in order; text and reasoning that are not empty."""
        thought, said = "".join(self._thought), "".join(self._said)
        num_held = self._reasoning.num_held if self._reasoning is not None else 0
        begin = self._num_fed - self._num_said - num_held  # of what is behind the reasoning
        parts = [Part(PartKind.REASONING, thought, begin)] if thought else []
        if said:
            parts.append(Part(PartKind.TEXT, said, self._num_fed))
        if self._calls is not None:
            parts += (_part(found, begin) for found in self._calls.take())
        self._thought.clear()
        self._said.clear()
        return tuple(parts)

    def _add(self, thought: str, said: str) -> None:
        self._thought.append(thought)
        self._num_said += len(said)
        if self._calls is None:
            self._said.append(said)
        else:
            self._calls.feed(said)


def _part(found: Said | CallDelta, begin: int) -> Part:
    """`begin`: characters before those that calls are looked for in."""
    if isinstance(found, CallDelta):
        return Part(PartKind.CALL, found.arguments, call=found)
    return Part(PartKind.TEXT, found.text, begin + found.end)
