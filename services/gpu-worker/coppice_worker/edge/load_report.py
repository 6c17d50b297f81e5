"""How far loading a model has come: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TextIO

from coppice_worker.model.loader import LoadProgress

LINE_EVERY_S = 2.0

_BAR_WIDTH = 40
_CLEAR_LINE = "\r\x1b[K"
_log = logging.getLogger("coppice.worker")


class LoadReport:
    """Called with each step of a load."""

    def __init__(self, stream: TextIO, now_s: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now_s = now_s
        self._is_terminal = stream.isatty()
        self._started_at_s = self._told_at_s = now_s()

    def __call__(self, progress: LoadProgress) -> None:
        now_s = self._now_s()
        share = progress.parameters_done / progress.parameters_total
        of_all = f"of {_count(progress.parameters_total)} parameters"
        if share >= 1:
            self._draw(_CLEAR_LINE)
            _log.info("loaded %s in %.1f s", of_all.removeprefix("of "), now_s - self._started_at_s)
        elif self._is_terminal:
            filled = int(share * _BAR_WIDTH)
            self._draw(f"{_CLEAR_LINE}loading {'█' * filled}{'░' * (_BAR_WIDTH - filled)} {share:4.0%} {of_all}")
        elif now_s - self._told_at_s >= LINE_EVERY_S:
            self._told_at_s = now_s
            _log.info("loading: %.0f %% %s", 100 * share, of_all)

    def _draw(self, text: str) -> None:
        if self._is_terminal:
            self._stream.write(text)
            self._stream.flush()


def _count(number: int) -> str:
    """A number of parameters, in millions or billions."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
