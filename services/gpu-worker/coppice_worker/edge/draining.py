"""A worker that is to end: schedulers send nothing new, and what runs gets time to end.

first signal ──► Draining to the cache service ──► schedulers acquire elsewhere ──► nothing runs ──► exit 0
second signal, a device that failed, or time is up ──────────────────────────────────────────────► exit
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from coppice.edge.signal_event import SignalEvent

POLL_S = 0.05
QUIET_S = 0.5  # longer than a grant that was on its way takes to arrive
AWAY_S = 3.0  # a scheduler whose connection broke is back sooner


class Running(NamedTuple):
    """What a worker has to do."""

    sequences: int
    is_connected: bool  # a scheduler is


class StopRequests:
    """Who asked the process to end. `ask` and `cut` may be called by handlers of signals and by any thread."""

    def __init__(self) -> None:
        self.asked = SignalEvent()
        self._was_asked = False  # by `ask`
        self._at_once = SignalEvent()

    def ask(self) -> None:
        """A first request lets what runs end; a second one does not."""
        if self._was_asked:
            self._at_once.set()
        self._was_asked = True
        self.asked.set()

    def ask_too(self) -> None:
        """The same from another process that was asked by whoever asks this one, too: it counts as no second time."""
        self.asked.set()

    def cut(self) -> None:
        """Nothing that runs is waited for."""
        self._at_once.set()
        self.asked.set()

    def cuts_within(self, timeout_s: float) -> bool:
        """Wait so long at most; whether what runs is to be cut. For one thread."""
        return self._at_once.wait(timeout_s)


def wait_until_quiet(look: Callable[[], Running], pause: Callable[[float], bool]) -> bool:
    """Wait until nothing runs: at once where no scheduler is connected, else when no sequence was seen for QUIET_S.
    Sequences whose scheduler stays away for AWAY_S do not count.

    `pause` waits for so many seconds, and says whether to give up. Returns False if it did.
    """
    quiet_s = away_s = 0.0
    while True:
        running = look()
        if running.is_connected:
            away_s = 0.0
        elif not running.sequences or away_s >= AWAY_S:
            return True
        if running.sequences:
            quiet_s = 0.0
        elif quiet_s >= QUIET_S:
            return True
        if pause(POLL_S):
            return False
        quiet_s += POLL_S
        away_s += POLL_S
