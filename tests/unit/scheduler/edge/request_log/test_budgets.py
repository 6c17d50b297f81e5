"""A tenant's tokens of this month, counted from the records of all front doors."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from coppice.request_log.record import RequestRecord, encoded
from coppice.request_log.writer import RecordWriter
from coppice.tenants.keys import ApiKey, digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind
from coppice_scheduler.edge.request_log.budgets import Budgets

NOW = datetime(2026, 12, 31, 23, 0, tzinfo=UTC)


def tenant(**fields: int) -> Tenant:
    return Tenant(id="a", api_key_sha256=(ApiKey(sha256=digest_of_key("k")),), **fields)  # type: ignore[arg-type]


def record(tokens: int, at: str = "2026-12-31T22:00:00.000Z", of: str = "a") -> RequestRecord:
    given = {"tenant": of, "tokens_in": tokens - 1, "tokens_out": 1}
    return RequestRecord(at, "r", "POST /v1/completions", 200, "stop", **given)  # type: ignore[arg-type]


def wanted(folder: Path, who: Tenant) -> Budgets:
    """Somebody with a budget has called, so records are read."""
    budgets = Budgets(str(folder))
    budgets.check(who, NOW)
    return budgets


def test_what_is_used_up_is_refused_until_the_month_is_over(tmp_path: Path) -> None:
    one, two = RecordWriter(tmp_path, "d0"), RecordWriter(tmp_path, "d1")
    who = tenant(tokens_per_month=100)
    budgets = wanted(tmp_path, who)
    one.write(record(60))
    two.write(record(39))
    two.write(record(500, of="b"))
    one.write(record(500, "2026-11-30T23:59:59.999Z"))
    budgets.refresh(NOW)
    assert budgets.used("a") == 99
    budgets.check(who, NOW)
    two.write(record(1))
    budgets.refresh(NOW)
    with pytest.raises(ApiError) as refused:
        budgets.check(who, NOW)
    error = refused.value
    assert (error.kind, error.code, error.retry_after_ms) == (ErrorKind.BUSY, "insufficient_quota", 3_600_000)
    assert "100 of its 100 tokens of this month; it goes on at 2027-01-01 00:00 UTC" in error.message
    new_year = datetime(2027, 1, 1, 0, 0, 1, tzinfo=UTC)
    budgets.refresh(new_year)
    budgets.check(who, new_year)


def test_a_line_that_is_still_being_written_counts_when_it_is_whole(tmp_path: Path) -> None:
    budgets = wanted(tmp_path, tenant(tokens_per_month=100))
    line = encoded(record(7))
    with (tmp_path / "requests-2026-12-31-x.jsonl").open("wb", buffering=0) as file:
        file.write(line + line[:10])
        budgets.refresh(NOW)
        assert budgets.used("a") == 7
        file.write(line[10:] + b"no record\n" + line)
        budgets.refresh(NOW)
        budgets.refresh(NOW)
    assert budgets.used("a") == 21
    again = wanted(tmp_path, tenant(tokens_per_month=100))
    again.refresh(NOW)
    assert again.used("a") == 21, "one that is started again knows all of the month"


def test_most_of_a_budget_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    who = tenant(soft_tokens_per_month=50)
    budgets = wanted(tmp_path, who)
    RecordWriter(tmp_path, "d0").write(record(50))
    budgets.refresh(NOW)
    for _ in range(3):
        budgets.check(who, NOW)
    assert caplog.text.count("tenant a has used 50 tokens of this month") == 1


def test_without_budgets_nothing_is_read(tmp_path: Path) -> None:
    budgets = Budgets(str(tmp_path / "gone"))
    budgets.check(tenant(), NOW)
    budgets.refresh(NOW)
    assert budgets.used("a") == 0


def test_the_soft_limit_is_the_lower_one() -> None:
    with pytest.raises(ValueError, match="soft_tokens_per_month"):
        tenant(tokens_per_month=10, soft_tokens_per_month=11)
