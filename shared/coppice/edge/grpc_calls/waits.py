"""Threads that wait for their callers: few at once, shared out among the parties that call.

    party a:  wait 3   wait 5   wait 9       one too many: the oldest wait of the party with most of them ends,
    party b:  wait 8                         which is wait 3

So nobody has to say how long a caller may take: a wait ends when its thread is needed, and who floods ends their own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WaitEnded(Exception):
    """The call was cancelled: others wait as well."""


class _Wait:
    __slots__ = ("cancel", "is_ended", "number")

    def __init__(self, number: int, cancel: Callable[[], object]) -> None:
        self.number = number
        self.cancel = cancel
        self.is_ended = False


class CallerWaits:
    """At most `waits_max` waits at once. Called on any thread."""

    def __init__(self, waits_max: int) -> None:
        assert waits_max > 0
        self._waits_max = waits_max
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waits: dict[str, list[_Wait]] = {}  # of each party that has any, oldest first

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return self._count()

    @contextmanager
    def waiting(self, party: str, cancel: Callable[[], object]) -> Iterator[None]:
        """Around what waits for the caller. `cancel` ends the call, on another thread. Raises WaitEnded at the end when
        that was done, whatever came from the caller meanwhile: it has been told that the call is over."""
        wait = _Wait(next(self._numbers), cancel)
        one_too_many = self._begin(party, wait)
        if one_too_many is not None:
            one_too_many.cancel()
        try:
            yield
        finally:
            self._end(party, wait)
        if wait.is_ended:
            raise WaitEnded

    def _begin(self, party: str, wait: _Wait) -> _Wait | None:
        """Returns the wait to end, where there is one too many."""
        with self._lock:
            self._waits.setdefault(party, []).append(wait)
            if self._count() <= self._waits_max:
                return None
            most = max(self._waits, key=lambda name: (len(self._waits[name]), -self._waits[name][0].number))
            oldest = self._waits[most][0]
            oldest.is_ended = True
            self._remove(most, oldest)
            return oldest

    def _end(self, party: str, wait: _Wait) -> None:
        with self._lock:
            if not wait.is_ended:
                self._remove(party, wait)

    def _remove(self, party: str, wait: _Wait) -> None:
        self._waits[party].remove(wait)
        if not self._waits[party]:
            del self._waits[party]

    def _count(self) -> int:
        return sum(map(len, self._waits.values()))
