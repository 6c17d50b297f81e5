"""What several planners are like together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from coppice_scheduler.core.state.request import LimitLeft, PoolUse, SchedulerStats, TenantLimitsLeft, TenantStats

_TOTALS = tuple(name for name in SchedulerStats.__struct_fields__ if name.startswith("total_"))
_SUMS = (*_TOTALS, "running", "waiting", "waiting_tokens", "leases", "steps_in_flight", "sleeping")


def with_totals(stats: SchedulerStats, before: SchedulerStats) -> SchedulerStats:
    """`stats`, with the totals of `before` added to its own."""
    return replace(stats, **{name: getattr(stats, name) + getattr(before, name) for name in _TOTALS})


def of_all(planners: Sequence[SchedulerStats]) -> SchedulerStats:
    """Sums; the longest wait of any; of a limit the least that any has left."""
    if len(planners) == 1:
        return planners[0]
    sums = {name: sum(getattr(stats, name) for stats in planners) for name in _SUMS}
    tenants: dict[str, TenantStats] = {}
    limits: dict[str, TenantLimitsLeft] = {}
    for stats in planners:
        for tenant, count in stats.tenants.items():
            known = tenants.get(tenant, TenantStats(0, 0))
            tenants[tenant] = TenantStats(known.running + count.running, known.waiting + count.waiting)
        for tenant, left in stats.limits_left.items():
            other = limits.get(tenant, left)
            limits[tenant] = TenantLimitsLeft(
                _least((left.requests, other.requests)), _least((left.tokens, other.tokens))
            )
    oldest_wait_ms = max(stats.oldest_wait_ms for stats in planners)
    pool = PoolUse(
        sum(stats.pool.num_blocks for stats in planners),
        sum(stats.pool.num_used_blocks for stats in planners),
        max(stats.pool.block_size for stats in planners),
    )
    return SchedulerStats(oldest_wait_ms=oldest_wait_ms, tenants=tenants, limits_left=limits, pool=pool, **sums)


def _least(limits: Iterable[LimitLeft | None]) -> LimitLeft | None:
    return min((limit for limit in limits if limit is not None), key=lambda limit: limit.left, default=None)
