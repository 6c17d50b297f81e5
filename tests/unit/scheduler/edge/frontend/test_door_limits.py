"""Calls per minute at the door."""

from __future__ import annotations

import pytest

from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.queue.limits import RateLimits
from coppice_scheduler.core.state.request import RefusedReason
from coppice_scheduler.core.state.settings import TenantLimits
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind
from coppice_scheduler.edge.frontend.door_limits import DoorLimits

SECOND_NS = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10**18

    def __call__(self) -> int:
        return self.now_ns


def tenant(per_minute: int, name: str = "a") -> Tenant:
    return Tenant(id=name, api_key_sha256=("0" * 64,), requests_per_minute=per_minute)


def test_a_minute_of_calls_at_once_and_then_one_at_a_time() -> None:
    clock = Clock()
    limits, a = DoorLimits(clock), tenant(60)
    for _ in range(60):
        limits.count(a)
    with pytest.raises(ApiError, match="tenant a has used up its 60 requests per minute") as refused:
        limits.count(a)
    assert (refused.value.kind, refused.value.code) == (ErrorKind.BUSY, RefusedReason.TENANT_RATE.value)
    assert refused.value.retry_after_ms == 1000
    clock.now_ns += SECOND_NS
    limits.count(a)
    with pytest.raises(ApiError):
        limits.count(a)
    limits.count(tenant(60, "b"))


def test_no_limit_is_none() -> None:
    limits = DoorLimits(Clock())
    for _ in range(1000):
        limits.count(tenant(0))


def test_a_limit_that_was_changed_counts_from_then_on() -> None:
    limits = DoorLimits(Clock())
    limits.count(tenant(1))
    limits.count(tenant(2))
    limits.count(tenant(2))
    with pytest.raises(ApiError, match="2 requests per minute"):
        limits.count(tenant(2))


def test_what_the_planner_would_take_passes_the_door() -> None:
    """Generations alone, each taken by the planner some time after it passed the door."""
    clock = Clock()
    door, a = DoorLimits(clock), tenant(7)
    planner = RateLimits(lambda _: TenantLimits(requests_per_minute=7), lambda _: 0)
    taken = 0
    for number in range(400):
        clock.now_ns += (number * 7919 % 13) * SECOND_NS
        later_ns = clock.now_ns + 5_000_000
        if planner.wait_ms("a", 1, later_ns)[0] == 0:
            door.count(a)  # does not raise
            planner.charge("a", 1, later_ns)
            taken += 1
    assert 200 < taken < 400
