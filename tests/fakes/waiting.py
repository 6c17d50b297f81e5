"""Wait for something that another thread or process does: poll until a deadline, never sleep and hope."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 120.0  # generous: a loaded machine is slow, and only a failing test waits this long
POLL_S = 0.02

T = TypeVar("T")


def wait_for(look: Callable[[], T], what: str, timeout_s: float = WAIT_S) -> T:
    """The first true answer of `look`. Fails with `what` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(POLL_S)
