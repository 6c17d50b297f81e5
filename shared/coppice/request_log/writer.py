"""Where a process writes records: files of its own in one folder, a new one each day, and before one becomes too large.

    requests-2026-01-31-<name>.jsonl      requests-2026-01-31-<name>.1.jsonl

A line is one `write` to a file that is only appended to, so whoever dies afterwards leaves it whole. A folder that
cannot be written to costs records, never a request; how many is counted.
"""

from __future__ import annotations

import logging
import os
from datetime import datetime
from pathlib import Path

from coppice.request_log.record import RequestRecord, encoded

PREFIX, SUFFIX = "requests-", ".jsonl"
FILE_BYTES_MAX = 256 * 1024 * 1024

_log = logging.getLogger("coppice.request_log")


class RecordWriter:
    """Of one process, which no other has the name of."""

    def __init__(self, folder: str | Path, name: str, *, bytes_max: int = FILE_BYTES_MAX, files_max: int = 0) -> None:
        """`files_max`: the oldest of more files of this name is removed; 0: none is."""
        self._folder = Path(folder)
        self._name = name
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._day = ""
        self._part = 0
        self._num_bytes = 0
        self._file: int | None = None
        self._failing = False
        self.num_lost = 0  # records that could not be written

    def write(self, record: RequestRecord) -> None:
        """Never raises."""
        line = encoded(record)
        try:
            self._open_for(record.at[:10], len(line))
            assert self._file is not None
            written = os.write(self._file, line)
            self._num_bytes += written
            if written < len(line):
                raise OSError("the disk is full")
        except (OSError, ValueError) as error:
            self._lost(error)
        else:
            self._failing = False

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open_for(self, day: str, num_bytes: int) -> None:
        if self._file is not None and day == self._day and self._num_bytes + num_bytes <= self._bytes_max:
            return
        same_day = day == self._day
        self.close()
        self._part = self._part + 1 if same_day and self._num_bytes else 0
        self._day = day
        path = self._path(day, self._part)
        while path.exists() and path.stat().st_size + num_bytes > self._bytes_max:
            self._part += 1
            path = self._path(day, self._part)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._num_bytes = os.fstat(self._file).st_size
        self._remove_oldest()

    def _path(self, day: str, part: int) -> Path:
        datetime.fromisoformat(day)  # it becomes part of a path
        number = f".{part}" if part else ""
        return self._folder / f"{PREFIX}{day}-{self._name}{number}{SUFFIX}"

    def _remove_oldest(self) -> None:
        if not self._files_max:
            return
        ours = self._folder.glob(f"{PREFIX}*-{self._name}*{SUFFIX}")
        for path in sorted(ours, key=lambda path: path.stat().st_mtime_ns)[: -self._files_max]:
            path.unlink(missing_ok=True)

    def _lost(self, error: Exception) -> None:
        self.num_lost += 1
        self.close()
        if not self._failing:
            self._failing = True
            _log.error("requests are not recorded: %s: %s; check the disk and --request-log", self._folder, error)
