"""Ctrl-C between steps instead of inside one, so that the cores are never left in the middle of a change."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.is_set = False


@contextmanager
def interrupts_wait() -> Iterator[Interrupted]:
    """The first Ctrl-C is only noted; a second one acts at once. Outside of the main thread nothing changes: Python
    interrupts that one alone."""
    noted = Interrupted()

    def note(number: int, frame: FrameType | None) -> None:
        noted.is_set = True
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    if before is None:  # not Python's, or the interpreter ends
        yield noted
        return
    try:
        signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread
        yield noted
        return
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
