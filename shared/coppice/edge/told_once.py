"""What comes again and again, such as a peer that is refused or cannot be reached, is not logged each time."""

from __future__ import annotations

import threading

_TEXTS_MAX = 256  # then it begins anew, so that nobody fills our memory with new texts
_REASONS_MAX = 8  # of one outage, that are told at once


class ToldOnce:
    """Any thread."""

    def __init__(self) -> None:
        self._texts: set[str] = set()
        self._lock = threading.Lock()

    def is_new(self, text: str) -> bool:
        with self._lock:
            if text in self._texts:
                return False
            if len(self._texts) >= _TEXTS_MAX:
                self._texts.clear()
            self._texts.add(text)
            return True


class Outage:
    """Whether something that is away is to be told of: once it has lasted, again for another reason, and from time to
    time. One thread; times in seconds of one clock."""

    def __init__(self, told_after_s: float, again_after_s: float) -> None:
        self._told_after_s = told_after_s
        self._again_after_s = again_after_s
        self._since_s: float | None = None
        self._told_s: float | None = None  # when it was told of last
        self._reasons: set[str] = set()  # that were told

    def begin(self, now_s: float) -> None:
        """It is away, since now or since before."""
        if self._since_s is None:
            self._since_s = now_s

    def lasts_s(self, now_s: float, reason: str) -> float | None:
        """It is away, since now or since before: how long it has been, where that is to be told now."""
        self.begin(now_s)
        return self.to_tell_s(now_s, reason)

    def to_tell_s(self, now_s: float, reason: str) -> float | None:
        """How long it has been away, where that is to be told now."""
        if self._since_s is None or now_s - self._since_s < self._told_after_s:
            return None
        is_new = reason not in self._reasons and len(self._reasons) < _REASONS_MAX
        is_due = self._told_s is None or now_s - self._told_s >= self._again_after_s
        if not is_new and not is_due:
            return None
        self.told(now_s, reason)
        return now_s - self._since_s

    def told(self, now_s: float, reason: str) -> None:
        """Somebody has told of it."""
        self._told_s = now_s
        self._reasons.add(reason)

    def end(self) -> bool:
        """It is back. Whether it was told that it was away."""
        was_told = self._told_s is not None
        self._since_s = self._told_s = None
        self._reasons.clear()
        return was_told
