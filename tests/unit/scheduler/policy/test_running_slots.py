"""Places given up for tenants that have few, and victims of a shortage: who, how often, and that work gets on."""

from __future__ import annotations

from collections import Counter

import pytest

from coppice.messages.index import Extend, NoCapacityReason
from coppice_scheduler.core.policy.running_slots import YIELDS_MAX
from coppice_scheduler.core.state.request import Finish
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.fair_world import FairWorld
from tests.fakes.scheduler.scheduler_bench import Bench
from tests.fakes.scheduler.scheduler_worker import u32


def settings(**fields: object) -> SchedulerSettings:
    given = {"instance": b"instance", "max_running": 4, "max_step_tokens": 64, "extend_ahead_blocks": 0}
    return SchedulerSettings(**{**given, **fields})  # type: ignore[arg-type]


def flooded(num_running: int = 4, num_waiting: int = 4) -> Bench:
    """Every place is held by tenant "a", and more of its requests wait."""
    bench = Bench(settings(max_running=num_running))
    bench.hold = True
    for number in range(num_running + num_waiting):
        bench.submit(f"a{number}", 3, max_new=50, tenant="a", domain="a")
    bench.advance()
    bench.answer()
    bench.hold = False
    return bench


def running(bench: Bench) -> dict[str, int]:
    return {tenant: stats.running for tenant, stats in bench.core.stats().tenants.items() if stats.running}


def test_who_comes_to_full_places_gets_the_latest_of_them() -> None:
    bench = flooded()
    bench.submit("b0", 3, tenant="b", domain="b")
    bench.settle()
    assert running(bench) == {"a": 3, "b": 1}
    assert [sequence_id for plan in bench.plans for sequence_id in u32(plan.detach)] in ([], [4])
    bench.result({1: 9, 2: 9, 3: 9, 4: 9})
    bench.settle()
    assert [sequence_id for plan in bench.plans for sequence_id in u32(plan.detach)] == [4]


def test_no_more_places_change_hands_than_are_due() -> None:
    bench = flooded()
    bench.hold = True
    for number in range(4):
        bench.submit(f"b{number}", 3, max_new=50, tenant="b", domain="b")
    bench.advance()
    bench.settle()
    given = bench.core.stats().total_preemptions
    assert given <= 2, "half of the places is its share"
    bench.advance(1000)
    bench.settle()
    assert bench.core.stats().total_preemptions == given, "and nothing goes back and forth"


def test_the_only_request_of_a_tenant_is_not_taken_for_another() -> None:
    bench = flooded(num_running=1)
    bench.submit("b0", 3, tenant="b", domain="b")
    bench.settle()
    assert running(bench) == {"a": 1}


def test_a_tenant_within_its_share_gives_nothing() -> None:
    bench = Bench(settings(max_running=4))
    bench.hold = True
    for tenant in "abcd":
        bench.submit(tenant, 3, max_new=50, tenant=tenant, domain=tenant)
    bench.advance()
    bench.answer()
    bench.submit("e", 3, tenant="e", domain="e")
    bench.advance()
    bench.settle()
    assert bench.core.stats().total_preemptions == 0


@pytest.mark.parametrize(("held", "given"), [((9, 8, 8, 7), 0), ((10, 8, 7, 7), 1)])
def test_a_tenant_gives_nothing_that_is_an_eighth_over_its_share(held: tuple[int, ...], given: int) -> None:
    """Where places come and go, tenants that all want their share are a little over it and below it all the time."""
    bench = Bench(settings(max_running=32, max_step_tokens=256))
    bench.hold = True
    for tenant, count in zip("abcd", held, strict=True):
        for number in range(count):
            bench.submit(f"{tenant}{number}", 3, max_new=50, tenant=tenant, domain=tenant)
    bench.advance()
    bench.answer()
    assert sum(running(bench).values()) == 32
    bench.submit("late", 3, tenant="d", domain="d")
    bench.advance()
    bench.settle()
    assert bench.core.stats().total_preemptions == given


@pytest.mark.parametrize("num_tenants", [2, 5])
def test_everybody_ends_and_nobody_gives_way_too_often(num_tenants: int) -> None:
    """Tenants of unlike demand come and go over few places and little memory."""
    world = FairWorld(settings(max_running=3, max_step_tokens=256), num_blocks=60, check=True)
    yields: Counter[str] = Counter()
    preempt = world.core._life.preempt

    def counted(request, why, now_ns):  # type: ignore[no-untyped-def]
        yields[request.request.request_id] = request.num_yields
        preempt(request, why, now_ns)

    world.core._life.preempt = counted  # type: ignore[method-assign]
    for number in range(60):
        tenant = f"t{number * number % num_tenants}"
        shape = (20 + number * 37 % 300, 1 + number * 13 % 40)
        world.at(number * 11 % 200, lambda tenant=tenant, shape=shape: world.submit(tenant, *shape))  # type: ignore[misc]
    world.run(until_ms=60_000)
    assert {visit.last is not None and visit.last.finish for visit in world.visits.values()} == {Finish.LENGTH}
    assert len(world.visits) == 60
    assert yields
    assert max(yields.values()) <= YIELDS_MAX
    assert world.core.is_idle()


def short_of_blocks(tenants: str, priorities: tuple[int, ...] = (0,) * 6) -> Bench:
    """Requests 1, 2, ... of these tenants run; all lack their next block, and only the first's ask is refused."""
    bench = Bench(settings(max_running=8))
    bench.hold = True
    for number, tenant in enumerate(tenants):
        bench.submit(f"r{number}", 3, max_new=20, tenant=tenant, priority=priorities[number])
    bench.advance()
    bench.answer()
    for _ in range(2):
        bench.result(dict.fromkeys(range(1, len(tenants) + 1), 9))
    while bench.batches:
        ops = bench.batches[0]
        refused = [isinstance(op, Extend) and op.lease_id.endswith(b"\1" + bytes(7)) for op in ops]
        full = NoCapacityReason.POOL_FULL
        bench.answer_with(*(bench.no(op, full) if no else bench.yes(op) for op, no in zip(ops, refused, strict=True)))
    return bench


def preempted(bench: Bench) -> list[str]:
    return [name for name, request in bench.core._life.requests.items() if request.sequence is None]


def test_a_shortage_falls_on_who_has_more_than_its_share_of_places() -> None:
    assert preempted(short_of_blocks("aaab")) == ["r2"], "the latest of a; not b, which came later"


def test_then_on_the_least_priority_and_never_on_the_first() -> None:
    assert preempted(short_of_blocks("aaa", (0, 5, 1))) == ["r1"]
    assert preempted(short_of_blocks("ab")) == ["r1"]
