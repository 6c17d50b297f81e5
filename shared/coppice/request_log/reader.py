"""Records out of a folder: the newest, those of one request, those of a span of time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from coppice.request_log.record import RequestRecord, decoded
from coppice.request_log.writer import PREFIX, SUFFIX

TAIL_BYTES = 4 * 1024 * 1024  # of each file, that a look at the newest reads
BYTES_MAX = 64 * 1024 * 1024  # of all files together
NS_PER_S = 1_000_000_000


def newest(
    folder: str | Path,
    count: int,
    *,
    tenant: str = "",
    asked: str = "",
    traced: bool = False,
    tail_bytes: int = TAIL_BYTES,
    bytes_max: int = BYTES_MAX,
) -> list[RequestRecord]:
    """Up to `count` records, the newest first: of one tenant; whose id, or the id of whose answer, is `asked`; that
    have a trace.

    A folder grows for years. So files that were written last come first, until the others have nothing newer; of each
    the last `tail_bytes` are read, and of all of them `bytes_max`.
    """
    needle = b'"trace":"' if traced else msgspec.json.encode(asked)[1:-1]
    found: list[RequestRecord] = []
    left = bytes_max
    for path, written_at in _last_written_first(folder):
        if left <= 0 or (len(found) == count and found[-1].at > written_at):
            break
        tail = _tail(path, min(tail_bytes, left))
        left -= len(tail)
        for line in tail.splitlines():
            record = decoded(line) if needle in line else None
            if record is not None and (not tenant or record.tenant == tenant) and asked in ("", record.id, record.call):
                found.append(record)
        found.sort(key=lambda record: record.at, reverse=True)
        del found[count:]
    return found


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


def _last_written_first(folder: str | Path) -> list[tuple[Path, str]]:
    """With the time of it, as `RequestRecord.at`."""
    times: list[tuple[int, Path]] = []
    for path in _files(folder):
        with suppress(FileNotFoundError):  # it was the oldest
            times.append((path.stat().st_mtime_ns, path))
    times.sort(reverse=True)
    return [(path, datetime.fromtimestamp(at_ns / NS_PER_S, UTC).isoformat()) for at_ns, path in times]


def _tail(path: Path, num_bytes: int) -> bytes:
    """Its first line may be cut, and then is no record."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - num_bytes))
            return file.read(num_bytes)
    except FileNotFoundError:
        return b""  # it was the oldest
