"""What several planners are like together."""

from __future__ import annotations

from msgspec.structs import replace

from coppice_scheduler.core.state.request import LimitLeft, TenantLimitsLeft, TenantStats
from coppice_scheduler.edge.base.engine import NO_STATS
from coppice_scheduler.edge.ipc.stats import of_all, with_totals


def test_counts_are_added_and_of_a_wait_or_a_limit_the_worst_is_told() -> None:
    one = replace(
        NO_STATS,
        running=2,
        waiting=1,
        oldest_wait_ms=30,
        total_steps=5,
        tenants={"a": TenantStats(2, 1)},
        limits_left={"a": TenantLimitsLeft(LimitLeft(10, 4, 5), None)},
    )
    other = replace(
        NO_STATS,
        running=3,
        oldest_wait_ms=70,
        total_steps=6,
        tenants={"a": TenantStats(1, 0), "b": TenantStats(2, 0)},
        limits_left={"a": TenantLimitsLeft(LimitLeft(10, 3, 6), LimitLeft(99, 1, 2))},
    )
    both = of_all([one, other])
    assert (both.running, both.waiting, both.oldest_wait_ms, both.total_steps) == (5, 1, 70, 11)
    assert both.tenants == {"a": TenantStats(3, 1), "b": TenantStats(2, 0)}
    assert both.limits_left == {"a": TenantLimitsLeft(LimitLeft(10, 3, 6), LimitLeft(99, 1, 2))}
    assert of_all([one]) is one


def test_totals_of_those_that_are_gone_stay() -> None:
    assert with_totals(replace(NO_STATS, running=1, total_steps=2), replace(NO_STATS, running=9, total_steps=3)) == (
        replace(NO_STATS, running=1, total_steps=5)
    )
