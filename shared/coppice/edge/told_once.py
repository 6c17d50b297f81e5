"""What comes again and again, such as a peer that is refused each second, is logged once."""

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
