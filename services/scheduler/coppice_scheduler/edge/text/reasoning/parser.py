"""Takes reasoning out of an answer, while it comes."""

from __future__ import annotations

from enum import Enum

from coppice_scheduler.edge.text.markers import SPACE_MAX, length_begun
from coppice_scheduler.edge.text.reasoning.formats import ReasoningFormat


class _Place(Enum):
    BEGINNING = "nothing but white space so far"
    REASONING = "within it"
    BEHIND = "white space behind it"
    ANSWER = "in the answer"


class ReasoningParser:
    """Of one answer. White space around reasoning is dropped."""

    def __init__(self, reasoning_format: ReasoningFormat, *, is_open: bool) -> None:
        """`is_open`: the prompt ends within reasoning."""
        self._format = reasoning_format
        self._place = _Place.REASONING if is_open else _Place.BEGINNING
        self._held = ""  # white space and what may belong to a marker
        self._has_told = False  # some reasoning

    @property
    def is_inside(self) -> bool:
        return self._place is _Place.REASONING

    @property
    def is_over(self) -> bool:
        return self._place is _Place.ANSWER

    @property
    def num_held(self) -> int:
        """Characters of which it is not known yet what they are."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, str]:
        """What of the text is reasoning, and what is of the answer."""
        if self._place is _Place.ANSWER:
            return "", text
        self._held += text
        if self._place is _Place.BEGINNING:
            self._begin()
        reasoning = self._reasoning() if self.is_inside else ""
        if self._place is _Place.BEHIND:
            self._held = self._held.lstrip()
            self._place = _Place.ANSWER if self._held else _Place.BEHIND
        return reasoning, self._taken(len(self._held)) if self._place is _Place.ANSWER else ""

    def flush(self) -> tuple[str, str]:
        """What was held back: the answer has ended."""
        held = self._taken(len(self._held))
        return (held.strip(), "") if self.is_inside else ("", held)

    def _begin(self) -> None:
        text = self._held.lstrip()
        if text.startswith(self._format.opens):
            self._held = text[len(self._format.opens) :]
            self._place = _Place.REASONING
        elif not self._format.opens.startswith(text) or len(self._held) > SPACE_MAX:
            self._place = _Place.ANSWER

    def _reasoning(self) -> str:
        at = self._held.find(self._format.closes)
        if at >= 0:
            told = self._taken(at).rstrip()
            self._held = self._held[len(self._format.closes) :]
            self._place = _Place.BEHIND
        else:
            whole = len(self._held) - length_begun(self._held, self._format.closes)
            bare = len(self._held[:whole].rstrip())
            told = self._taken(bare if whole - bare <= SPACE_MAX else whole)
        told = told if self._has_told else told.lstrip()
        self._has_told = self._has_told or bool(told)
        return told

    def _taken(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken
