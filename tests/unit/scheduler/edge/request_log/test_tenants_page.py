"""What an operator is told of tenants: what is at work, limits, and what is left of them. No key, nor what it is of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from coppice.request_log.record import RequestRecord
from coppice.request_log.writer import RecordWriter
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.keys import ApiKey, digest_of_key
from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import LimitLeft, SchedulerStats, TenantLimitsLeft, TenantStats
from coppice_scheduler.edge.request_log.tenants_page import TenantsPage


def tenant(name: str, **fields: Any) -> Tenant:
    return Tenant(id=name, api_key_sha256=(ApiKey(sha256=digest_of_key(name), name="laptop"),), **fields)


def stats(**tenants: tuple[int, int]) -> SchedulerStats:
    left = TenantLimitsLeft(LimitLeft(60, 12, 1000), None)
    of_tenants = {name: TenantStats(*numbers) for name, numbers in tenants.items()}
    return SchedulerStats(0, 0, 0, 0, of_tenants, 0, 0, 0, 0, 0, 0, 0, 0, 0, limits_left={"b": left})


def asked(page: TenantsPage, query: str = "") -> Mapping[str, Any]:
    answer = page("/tenants", query)
    assert answer is not None
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert b"laptop" not in answer.body
    assert b"sha256" not in answer.body
    found = json.loads(answer.body)
    assert isinstance(found, dict)
    return found


def test_those_with_most_at_work_come_first_with_their_limits_and_what_is_left() -> None:
    limited = tenant("b", concurrency=8, max_queued=4, weight=2.0, requests_per_minute=60, tokens_per_minute=900)
    directory = TenantDirectory((tenant("c"), tenant("a"), limited))
    found = asked(TenantsPage(lambda: directory, lambda: stats(b=(3, 2), c=(4, 0)), None))
    assert found["num_tenants"] == 3
    assert [one["tenant"] for one in found["tenants"]] == ["b", "c", "a"]
    assert found["tenants"][0] == {
        "tenant": "b",
        "domain": "tenant/b",
        "running": 3,
        "waiting": 2,
        "concurrency": 8,
        "max_queued": 4,
        "weight": 2.0,
        "requests_per_minute": 60,
        "requests_left": 12,
        "tokens_per_minute": 900,
        "tokens_left": None,
        "tokens_per_month": 0,
        "soft_tokens_per_month": 0,
        "tokens_of_month": None,
    }
    assert (found["tenants"][2]["running"], found["tenants"][2]["waiting"]) == (0, 0)


def test_a_budget_is_told_with_what_was_used_of_it(tmp_path: Path) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    writer = RecordWriter(tmp_path, "d0")
    directory = TenantDirectory((tenant("a", tokens_per_month=100), tenant("b")))
    page = TenantsPage(lambda: directory, stats, str(tmp_path))
    for total in (30, 60):
        writer.write(
            RequestRecord(now, "r", "POST /v1/completions", 200, "stop", tenant="a", tokens_in=20, tokens_out=10)
        )
        told = [(one["tokens_per_month"], one["tokens_of_month"]) for one in asked(page)["tenants"]]
        assert told == [(100, total), (0, None)]


def test_as_many_are_told_as_were_asked_for() -> None:
    directory = TenantDirectory(tuple(tenant(f"t{number}") for number in range(5)))
    page = TenantsPage(lambda: directory, stats, None)
    found = asked(page, "limit=2")
    assert (found["num_tenants"], [one["tenant"] for one in found["tenants"]]) == (5, ["t0", "t1"])
    assert page("/requests", "") is None


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "a", "", "\u0663"])
def test_what_is_no_limit_is_refused(limit: str) -> None:
    page = TenantsPage(TenantDirectory.single_default, stats, None)
    answer = page("/tenants", f"limit={limit}")
    assert answer is not None
    if limit:
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "limit")
    else:
        assert answer.status == 200, "as it is left out"
