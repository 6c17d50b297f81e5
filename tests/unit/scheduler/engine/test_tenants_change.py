"""Tenants change while the core runs: limits and weights count at once, who is gone is told, nobody else notices."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from coppice.ids import DomainId
from coppice.messages.index import Acquire, NoCapacityReason
from coppice_scheduler.core.state.request import Finish, OutputErrorCode, RefusedReason
from coppice_scheduler.core.state.settings import Maximum, SchedulerSettings, TenantLimits, TenantSettings
from tests.fakes.scheduler.scheduler_bench import Bench

D = DomainId("d")


def tenants(**limits: TenantLimits) -> TenantSettings:
    return TenantSettings(
        limits=limits,
        domains=dict.fromkeys(limits, D),
        fixed_domains=frozenset(),
        guarantees=MappingProxyType({}),
        maximums={D: Maximum()},
    )


def bench(*, max_running: int = 8, **limits: TenantLimits) -> Bench:
    plain = SchedulerSettings(instance=b"instance", max_running=max_running, max_step_tokens=64, extend_more_blocks=0)
    return Bench(plain.with_tenants(tenants(**limits)))


def change(bench: Bench, **limits: TenantLimits) -> None:
    bench.core.set_tenants(tenants(**limits), bench.now_ns)
    bench.advance()


def reason(bench: Bench, name: str, tenant: str) -> RefusedReason | None:
    refused = bench.submit(name, 4, tenant=tenant)
    return refused and refused.reason


def test_a_tenant_is_served_from_the_change_on() -> None:
    world = bench(a=TenantLimits())
    assert reason(world, "x", "b") is RefusedReason.TENANT_REMOVED
    change(world, a=TenantLimits(), b=TenantLimits())
    assert reason(world, "y", "b") is None


def test_requests_of_a_removed_tenant_end_and_others_go_on() -> None:
    world = bench(a=TenantLimits(), b=TenantLimits(), max_running=2)
    for name, tenant in (("a1", "a"), ("b1", "b")):
        assert reason(world, name, tenant) is None
    world.answer()
    world.result({1: 5, 2: 5})
    assert reason(world, "a2", "a") is None
    assert world.submit("a3", 4, tenant="a", fork_of="a2") is None
    assert reason(world, "b2", "b") is None
    change(world, b=TenantLimits())
    for name in ("a1", "a2", "a3"):
        last = world.last(name)
        assert last.finish is Finish.ERROR
        assert last.error is not None
        assert last.error.code is OutputErrorCode.TENANT_REMOVED
    assert set(world.core._life.requests) == {"b1", "b2"}
    assert not [output for output in world.outputs if output.request_id[0] == "b" and output.finish]


def test_a_tenant_that_moves_to_another_domain_takes_nothing_along() -> None:
    world = bench(a=TenantLimits())
    assert reason(world, "x", "a") is None
    moved = tenants(a=TenantLimits())
    moved = TenantSettings(moved.limits, {"a": DomainId("e")}, frozenset(), {}, {DomainId("e"): Maximum()})
    world.core.set_tenants(moved, world.now_ns)
    world.advance()
    assert world.last("x").error is not None
    assert reason(world, "y", "a") is RefusedReason.TENANT_REMOVED, "a front door that has not heard of it yet"
    assert world.submit("z", 4, tenant="a", domain="e") is None


def test_lower_ceilings_end_nobody_and_count_for_who_comes() -> None:
    world = bench(a=TenantLimits())
    for name in ("x", "y"):
        assert reason(world, name, "a") is None
    change(world, a=TenantLimits(max_concurrency=1))
    assert reason(world, "z", "a") is RefusedReason.TENANT_CONCURRENCY
    assert set(world.core._life.requests) == {"x", "y"}
    change(world, a=TenantLimits(max_concurrency=3))
    assert reason(world, "z", "a") is None


def test_weights_count_for_what_is_served_from_then_on() -> None:
    world = bench(a=TenantLimits(weight=1.0), b=TenantLimits(weight=1.0))
    for name, tenant in (("x", "a"), ("y", "b")):
        assert reason(world, name, tenant) is None
    shares = world.core._life.shares
    assert shares.weight_at_work == 2.0
    before = shares.counter(shares.number_of("a"))
    change(world, a=TenantLimits(weight=4.0), b=TenantLimits(weight=1.0))
    number = shares.number_of("a")
    assert (shares.counter(number), shares.price(number, 8), shares.weight_at_work) == (before, 2.0, 5.0)
    world.cancel("x")
    world.cancel("y")
    assert shares.weight_at_work == 0.0


@pytest.mark.parametrize(
    ("before", "after", "left"),
    [
        (0, 2, 2),  # a new limit begins full
        (4, 2, 2),  # three are left, and the new one has room for two
        (4, 8, 3),
        (4, 0, 8),  # no limit
    ],
)
def test_rates_change_and_what_is_used_up_stays_so(before: int, after: int, left: int) -> None:
    world = bench(a=TenantLimits(requests_per_minute=before))
    assert reason(world, "first", "a") is None
    change(world, a=TenantLimits(requests_per_minute=after))
    taken = [reason(world, f"r{i}", "a") for i in range(left + 1)]
    assert taken[:left] == [None] * left
    assert taken[left] is (RefusedReason.TENANT_RATE if after else None)


def test_outputs_of_before_a_token_limit_are_not_charged_to_it() -> None:
    world = bench(a=TenantLimits())
    assert world.submit("x", 4, max_new=8, tenant="a") is None
    world.answer()
    for _ in range(6):
        world.result({1: 7})
        world.settle()
    change(world, a=TenantLimits(tokens_per_minute=4))
    assert reason(world, "y", "a") is None


def test_without_a_file_whoever_comes_is_served() -> None:
    plain = Bench()
    assert reason(plain, "x", "anybody") is None
    assert plain.ops(Acquire)


def with_a_new_domain(max_running: int = 8) -> Bench:
    """Tenant a is in domain d, and b in one that the cache service has not heard of."""
    world = bench(a=TenantLimits(), max_running=max_running)
    limits = {"a": TenantLimits(), "b": TenantLimits()}
    domains = {"a": D, "b": DomainId("new")}
    maximums = {D: Maximum(), DomainId("new"): Maximum()}
    world.core.set_tenants(TenantSettings(limits, domains, frozenset(), {}, maximums), world.now_ns)
    world.advance()
    return world


def test_a_tenant_that_the_cache_does_not_know_waits_alone_and_is_told_why() -> None:
    world = with_a_new_domain(max_running=2)
    assert world.submit("b1", 4, tenant="b", domain="new") is None
    world.answer_with(world.no(world.batches[0][0], NoCapacityReason.DOMAIN_UNKNOWN, retry_after_ms=500))
    for name in ("a1", "a2"):
        assert reason(world, name, "a") is None
    world.answer()
    assert world.core.stats().running == 2, "others run, in all the slots there are"
    world.advance(499)
    assert world.ops(Acquire) == []
    world.advance(world.settings.queue_timeout_ms - 499)
    error = world.last("b1").error
    assert error is not None
    assert (error.code, error.retry_after_ms) == (OutputErrorCode.TENANT_NOT_READY, world.settings.queue_timeout_ms)
    assert "does not know domain new" in error.message


def test_it_runs_as_soon_as_the_cache_knows_it() -> None:
    world = with_a_new_domain()
    assert world.submit("b1", 4, tenant="b", domain="new") is None
    world.answer_with(world.no(world.batches[0][0], NoCapacityReason.DOMAIN_UNKNOWN, retry_after_ms=500))
    world.advance(500)
    world.answer()
    assert world.core.stats().running == 1
