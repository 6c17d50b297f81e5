"""The folder in which front doors count, and the end of those that nobody was left to remove.

The planner's process holds a lock on its folder for as long as it lives, whatever it dies of. So a folder that can be
locked is nobody's. (A process id in the name would not tell: containers that share the place do not share the ids.)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "coppice-front-doors-"
_SHARED_MEMORY = "/dev/shm"  # nosec B108 # a folder of our own is made in it, by mkdtemp


@contextmanager
def metrics_folder(parent: str | None = None) -> Iterator[str]:
    """A folder for what front doors count; in memory where the system has such a place. Removes what others left."""
    if parent is None:
        parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()
    for left in Path(parent).glob(f"{_PREFIX}*"):
        _remove_if_left(left)
    folder, lock = _new(parent)
    os.mkdir(recent_records(folder))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def recent_records(folder: str) -> str:
    """Where records of requests are in it (`coppice.request_log`)."""
    return f"{folder}/requests"


def _new(parent: str) -> tuple[str, int]:
    """A folder and the descriptor that locks it."""
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        lock = _locked(folder)
        if lock is not None and os.path.isdir(folder):
            return folder, lock
        # Another scheduler that starts now took it for one that was left, before it was locked.
        if lock is not None:
            os.close(lock)


def _remove_if_left(folder: Path) -> None:
    lock = _locked(folder)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: str | Path) -> int | None:
    """None where somebody has it, or it is not ours, or gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
