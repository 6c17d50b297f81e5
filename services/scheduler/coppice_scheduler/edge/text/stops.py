"""Stop strings over text that comes in pieces. Nothing of a stop string is ever sent, not even its beginning.

    text so far   "the end\\nUs"     stop "\\nUser:"
    sent          "the end"         held back "\\nUs", until it is the stop or cannot be any more

The stop that is complete first wins (of two that end together, the longer), so the result does not depend on how the
text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scanned:
    text: str  # may be sent
    stop: str | None = None  # the stop string that was found; nothing after it counts


class StopScanner:
    """`keeps_stop`: the stop string that was found is sent, too; nothing after it."""

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._first = frozenset(stop[0] for stop in stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._keeps_stop = keeps_stop
        self._held = ""

    def feed(self, new: str) -> Scanned:
        """Take the next piece; say what may be sent now."""
        if not self._stops:
            return Scanned(new)
        text = self._held + new
        found = self._earliest(text)
        if found is not None:
            place, stop = found
            self._held = ""
            return Scanned(text[: place + len(stop)] if self._keeps_stop else text[:place], stop)
        cut = self._beginning_of_a_stop(text)
        self._held = text[cut:]
        return Scanned(text[:cut])

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, text: str) -> tuple[int, str] | None:
        places = [(text.find(stop), stop) for stop in self._stops]
        complete = [(place + len(stop), place, stop) for place, stop in places if place >= 0]
        if not complete:
            return None
        _, place, stop = min(complete)
        return place, stop

    def _beginning_of_a_stop(self, text: str) -> int:
        """Index of the longest end of `text` that some stop begins with; len(text) when there is none."""
        for place in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[place] in self._first:
                tail = text[place:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return place
        return len(text)
