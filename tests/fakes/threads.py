"""A process at its limit of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread can be started meanwhile."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # as the standard library says it

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        yield
