"""Records in files: written whole, found again, summed up to the token."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coppice.request_log import reader
from coppice.request_log.reader import between, newest
from coppice.request_log.record import RequestRecord, decoded, encoded
from coppice.request_log.usage import summed
from coppice.request_log.writer import PREFIX, SUFFIX, RecordWriter


def record(number: int, at: str = "2026-01-31T12:00:00.000Z", **fields: object) -> RequestRecord:
    given = {"tenant": "a", "tokens_in": 10, "tokens_out": number, **fields}
    return RequestRecord(at, f"r{number}", "POST /v1/completions", 200, "stop", **given)  # type: ignore[arg-type]


def test_of_many_files_those_that_were_written_last_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder grows for years."""
    opened: list[str] = []
    original = reader._tail
    monkeypatch.setattr(reader, "_tail", lambda path, size: opened.append(path.name) or original(path, size))
    for day in range(1, 9):
        path = tmp_path / f"{PREFIX}2026-01-0{day}-door{SUFFIX}"
        records = [record(10 * day + n, at=f"2026-01-0{day}T0{n}:00:00.000Z", trace="t" * n) for n in range(4)]
        path.write_bytes(b"".join(map(encoded, records)))
        written_s = datetime(2026, 1, day, 4, tzinfo=UTC).timestamp()
        os.utime(path, (written_s, written_s))
    assert [one.id for one in newest(tmp_path, 5)] == ["r83", "r82", "r81", "r80", "r73"]
    assert [name[len(PREFIX) :][:10] for name in opened] == ["2026-01-08", "2026-01-07"]
    assert [one.id for one in newest(tmp_path, 1, asked="r31")] == ["r31"]
    assert [one.id for one in newest(tmp_path, 4, traced=True)] == ["r83", "r82", "r81", "r73"]
    opened.clear()
    size = path.stat().st_size
    assert newest(tmp_path, 1, asked="r31", bytes_max=2 * size) == []
    assert len(opened) <= 3


def test_what_is_written_is_read(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, "d0")
    whole = record(1, stages=(("queued", 0.0, 1.5, "", 3),), chunks=((1.5, 2.0, 8),), call="cmpl-1")
    writer.write(whole)
    assert newest(tmp_path, 5) == [whole]
    assert newest(tmp_path, 5, asked="cmpl-1") == newest(tmp_path, 5, asked="r1") == [whole]
    assert newest(tmp_path, 5, asked="r") == []
    writer.close()


def test_the_newest_of_all_writers_come_first_and_lines_that_were_cut_do_not_count(tmp_path: Path) -> None:
    one, two = RecordWriter(tmp_path, "d0"), RecordWriter(tmp_path, "d1")
    for number in range(6):
        (one, two)[number % 2].write(record(number, f"2026-01-31T12:00:0{number}.000Z", tenant="ab"[number // 3]))
    (path,) = tmp_path.glob("*d0*")
    with path.open("ab") as file:
        file.write(encoded(record(9, "2026-01-31T13:00:00.000Z"))[:-20])
    assert [found.id for found in newest(tmp_path, 4)] == ["r5", "r4", "r3", "r2"]
    assert [found.id for found in newest(tmp_path, 4, tenant="a")] == ["r2", "r1", "r0"]
    assert decoded(b"[]") is None
    assert decoded(b"\xff{") is None


def test_a_day_and_a_size_are_files_of_their_own(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, "d0", bytes_max=2 * len(encoded(record(1))))
    for number in range(5):
        writer.write(record(number))
    writer.write(record(5, "2026-02-01T00:00:00.000Z"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "requests-2026-01-31-d0.1.jsonl",
        "requests-2026-01-31-d0.2.jsonl",
        "requests-2026-01-31-d0.jsonl",
        "requests-2026-02-01-d0.jsonl",
    ]
    again = RecordWriter(tmp_path, "d0", bytes_max=2 * len(encoded(record(1))))
    again.write(record(6))
    assert len(newest(tmp_path, 99)) == 7, "one that is started again writes over nothing"


def test_where_the_newest_are_wanted_older_files_go(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, "d0", bytes_max=3 * len(encoded(record(1))), files_max=2)
    for number in range(20):
        writer.write(record(number, f"2026-01-31T12:00:{number:02}.000Z"))
    assert len(list(tmp_path.iterdir())) == 2
    found = [one.id for one in newest(tmp_path, 99)]
    assert found == [f"r{number}" for number in range(19, 19 - len(found), -1)]
    assert len(found) >= 3


def test_a_folder_that_is_gone_costs_records_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = RecordWriter(tmp_path / "gone", "d0")
    for number in range(3):
        writer.write(record(number))
    assert writer.num_lost == 3
    assert caplog.text.count("are not recorded") == 1
    (tmp_path / "gone").mkdir()
    writer.write(record(4))
    assert [found.id for found in newest(tmp_path / "gone", 9)] == ["r4"]


def test_usage_is_summed_by_what_is_asked_for(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, "d0")
    writer.write(record(1, "2026-01-30T23:59:59.999Z"))
    writer.write(record(2, "2026-01-31T00:00:00.000Z", key="ci", tokens_cached=4))
    writer.write(record(3, "2026-01-31T10:00:00.000Z", tenant="b"))
    writer.write(record(4, "2026-02-01T00:00:00.000Z"))
    found = list(between(tmp_path, "2026-01-31", "2026-02-01"))
    assert [one.id for one in found] == ["r2", "r3"]
    (a, b) = summed(found, ["tenant"])
    assert (a.group, a.tokens_in, a.tokens_cached, a.tokens_out) == (("a",), 10, 4, 2)
    assert (b.group, b.num_requests, b.num_failed) == (("b",), 1, 0)
    days = summed(between(tmp_path, "2026-01", "2026-03"), ["day", "key"])
    assert [(one.group, one.num_requests) for one in days] == [
        (("2026-01-30", ""), 1),
        (("2026-01-31", ""), 1),
        (("2026-01-31", "ci"), 1),
        (("2026-02-01", ""), 1),
    ]
