"""What is made of files, and made again when they change.

files change --next look--> what they say is right --> used from now on
                            something is wrong     --> the old one stays, the log says so once
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from coppice.errors import UsageError

_log = logging.getLogger(__name__)
_Made = TypeVar("_Made")
_Signature = tuple[tuple[int, int, int], ...]


class Reloaded(Generic[_Made]):
    """Any thread. Looks at the files at each call of `now`."""

    def __init__(self, what: str, paths: Sequence[Path], make: Callable[[], _Made]) -> None:
        """`what` names the files in the log. `make` reads them and raises UsageError, which passes through here."""
        self._what = what
        self._paths = paths
        self._make = make
        self._lock = threading.Lock()
        # Before they are read: files that change meanwhile have another signature at the next look.
        self._seen = self._signature()
        self._made = make()

    def now(self) -> _Made:
        with self._lock:
            signature = self._signature()
            if signature is not None and signature != self._seen:
                self._seen = signature
                self._make_again()
            return self._made

    def _make_again(self) -> None:
        try:
            self._made = self._make()
        except UsageError as error:
            _log.error("changed %s are refused, the old ones stay: %s", self._what, error.line())
            return
        _log.info("%s changed; new connections use them", self._what)

    def _signature(self) -> _Signature | None:
        """None: a file is not there, because it is being replaced."""
        try:
            found = [os.stat(path) for path in self._paths]
        except OSError:
            return None
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in found)
