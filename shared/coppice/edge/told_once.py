"""What comes again and again, such as a peer that is refused each second, or cannot be reached, is logged once."""

from __future__ import annotations

import threading

_TEXTS_MAX = 256  # then it begins anew, so that nobody fills our memory with new texts


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
    """Whether something that is away has been so for long enough to be told, once. One thread; times in seconds of one
    clock."""

    def __init__(self, told_after_s: float) -> None:
        self._told_after_s = told_after_s
        self._since_s: float | None = None
        self._is_told = False

    def begin(self, now_s: float) -> None:
        """It is away, since now or since before."""
        if self._since_s is None:
            self._since_s = now_s

    def to_tell_s(self, now_s: float) -> float | None:
        """How long it has been away, where that is to be told now."""
        if self._since_s is None or self._is_told or now_s - self._since_s < self._told_after_s:
            return None
        self._is_told = True
        return now_s - self._since_s

    def end(self) -> bool:
        """It is back. Whether it was told that it was away."""
        was_told = self._is_told
        self._since_s, self._is_told = None, False
        return was_told
