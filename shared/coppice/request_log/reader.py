"""Records out of a folder: the newest, those of one request, those of a span of time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coppice.request_log.record import RequestRecord, decoded
from coppice.request_log.writer import PREFIX, SUFFIX

TAIL_BYTES = 4 * 1024 * 1024  # of each file, that a look at the newest reads


def newest(
    folder: str | Path, count: int, *, tenant: str = "", asked: str = "", tail_bytes: int = TAIL_BYTES
) -> list[RequestRecord]:
    """Up to `count` records, the newest first: of one tenant; whose id, or the id of whose answer, is `asked`. Of each
    file only the last `tail_bytes` are read."""
    found = [
        record
        for path in _files(folder)
        for record in _tail(path, tail_bytes)
        if (not tenant or record.tenant == tenant) and (not asked or asked in (record.id, record.call))
    ]
    found.sort(key=lambda record: record.at, reverse=True)
    return found[:count]


def between(folder: str | Path, start: str, end: str) -> Iterator[RequestRecord]:
    """Those that ended from `start` on and before `end`, both as `RequestRecord.at` or the beginning of one."""
    for path in _files(folder):
        day = path.name[len(PREFIX) :][:10]
        if start[:10] <= day <= end[:10]:
            with path.open("rb") as lines:
                for line in lines:
                    record = decoded(line)
                    if record is not None and start <= record.at < end:
                        yield record


def _files(folder: str | Path) -> list[Path]:
    return sorted(Path(folder).glob(f"{PREFIX}*{SUFFIX}"))


def _tail(path: Path, num_bytes: int) -> Iterator[RequestRecord]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size - num_bytes)
            file.seek(start)
            lines = file.read(num_bytes).splitlines()
    except FileNotFoundError:
        return  # it was the oldest
    for line in lines[1:] if start else lines:
        record = decoded(line)
        if record is not None:
            yield record
