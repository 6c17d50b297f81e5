"""One incarnation of a simulated process: it lives, it may be paused, it dies once.

While it is paused, whatever is due for it waits; it happens in order when the process goes on. What is due for a dead
incarnation never happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

from coppice.session.versions import SPOKEN, Versions
from coppice_sim.base.timeline import Timeline


class Process:
    """`speaks`: versions of the session protocol that its build speaks."""

    def __init__(self, name: str, timeline: Timeline, rng: Random, speaks: Versions = SPOKEN) -> None:
        self.name = name
        self.timeline = timeline
        self.rng = rng
        self.speaks = speaks
        self.is_alive = True
        self.is_paused = False
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def now_ns(self) -> int:
        return self.timeline.now_ns

    def deliver(self, action: Callable[[], None]) -> None:
        """Do it now, or when the process goes on, or never."""
        if not self.is_alive:
            return
        if self.is_paused:
            self._waiting.append(action)
        else:
            action()

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        self.timeline.after(delay_ns, lambda: self.deliver(action))

    def every(self, period_ns: int, action: Callable[[], None]) -> None:
        """Now and then again, as timers do: once after a pause, however long it was."""

        def again() -> None:
            action()
            self.after(period_ns, again)

        self.after(self.rng.randrange(period_ns) + 1, again)

    def pause(self) -> None:
        self.is_paused = True

    def go_on(self) -> None:
        if not self.is_alive or not self.is_paused:
            return
        self.is_paused = False
        while self._waiting and self.is_alive and not self.is_paused:
            self._waiting.popleft()()

    def die(self) -> None:
        """Subclasses close their connections."""
        self.is_alive = False
        self._waiting.clear()
