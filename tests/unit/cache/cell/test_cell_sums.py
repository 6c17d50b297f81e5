"""What planners say of their tenants reaches the other planners, and nobody else."""

from __future__ import annotations

import pytest

from coppice.ids import CacheEpoch, SchedulerEpoch
from coppice.messages import cell as messages
from coppice.messages.cell import SUM_MAX, Planners, Served, ServedElsewhere, TenantSums
from coppice.messages.ownership import SessionName, Succeed
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.state import cell
from tests.unit.cache.world import World

ONE = CacheEpoch(1)
CellMessage = Planners | ServedElsewhere


def sums(tenant: str, num_tokens: int = 0) -> TenantSums:
    return TenantSums(tenant, num_tokens, 0, 0, 0, 0, False)


def say(world: World, session: SchedulerEpoch, *tenants: TenantSums, is_whole: bool = False) -> None:
    world.core.receive_client(session, Served(tenants, is_whole), world.now_ns)
    world.collect()


def heard(world: World, session: SchedulerEpoch) -> list[CellMessage]:
    return [message for message in world.told(session) if isinstance(message, CellMessage)]


@pytest.fixture
def world() -> World:
    world = World()
    world.session = world.attach()
    return world


def test_a_planner_that_is_alone_is_told_nothing(world: World) -> None:
    stranger = world.core.attach_client(SchedulerEpoch(0), world.now_ns, plans=False)
    say(world, world.session, sums("x", 5), is_whole=True)
    world.tick(3_000, alive=(world.session, stranger))
    assert heard(world, world.session) == heard(world, stranger) == []


def test_planners_hear_of_each_other_as_they_come_and_go(world: World) -> None:
    first, second = world.session, world.attach()
    third = world.attach()
    assert heard(world, first) == [Planners(ONE, (second,)), Planners(ONE, (second, third))]
    assert heard(world, third) == [Planners(ONE, (first, second))]
    world.core.end_client(second, world.now_ns)
    world.collect()
    assert heard(world, first)[-1] == Planners(ONE, (third,))
    world.core.receive_client(third, Succeed(SessionName(b"", 0, third, b"")), world.now_ns)  # type: ignore[arg-type]
    world.collect()
    assert heard(world, first)[-1] == Planners(ONE, ())


def test_a_silent_session_that_expires_is_gone_for_the_others(world: World) -> None:
    second = world.attach()
    world.tick(12_000, alive=(world.session,))
    assert heard(world, world.session)[-1] == Planners(ONE, ())
    assert second not in world.core.state.sessions


def test_sums_are_carried_to_all_other_planners_and_to_them_alone(world: World) -> None:
    second, third = world.attach(), world.attach()
    stranger = world.core.attach_client(SchedulerEpoch(0), world.now_ns, plans=False)
    say(world, second, sums("x", 5), sums("y"), is_whole=True)
    told = ServedElsewhere(ONE, second, (sums("x", 5), sums("y")), True)
    assert heard(world, world.session)[-1] == heard(world, third)[-1] == told
    assert heard(world, second)[-1] == Planners(ONE, (world.session, third))
    assert heard(world, stranger) == []


def test_who_attaches_hears_what_was_said_so_far(world: World) -> None:
    say(world, world.session, sums("x", 5), sums("y", 1), is_whole=True)
    say(world, world.session, sums("x", 8))
    silent = world.attach()
    third = world.attach()
    assert heard(world, third) == [
        Planners(ONE, (world.session, silent)),
        ServedElsewhere(ONE, world.session, (sums("x", 8), sums("y", 1)), True),
    ]
    world.log.clear()
    assert world.attach(third) == third
    assert len(heard(world, third)) == 2, "a fresh link has lost what was said"
    assert heard(world, world.session) == []


def test_what_is_said_whole_replaces_what_was_said_before(world: World) -> None:
    say(world, world.session, sums("x", 5), sums("y", 1), is_whole=True)
    say(world, world.session, sums("y", 2), is_whole=True)
    assert heard(world, world.attach())[-1] == ServedElsewhere(ONE, world.session, (sums("y", 2),), True)


def test_a_tenant_that_is_named_twice_is_told_once(world: World) -> None:
    second = world.attach()
    say(world, second, sums("x", 5), sums("x", 6))
    assert heard(world, world.session)[-1] == ServedElsewhere(ONE, second, (sums("x", 6),), False)


def test_sums_of_a_session_that_is_over_reach_nobody(world: World) -> None:
    second = world.attach()
    world.core.end_client(second, world.now_ns)
    say(world, second, sums("x", 5))
    assert heard(world, world.session)[-1] == Planners(ONE, ())


@pytest.mark.parametrize(
    "wrong",
    [
        sums("x" * 5_000),
        TenantSums("x", SUM_MAX + 1, 0, 0, 0, 0, False),
        TenantSums("x", 0, 0, 0, SUM_MAX + 1, 0, False),
    ],
    ids=["name", "prefill", "prompts"],
)
def test_absurd_sums_are_refused_and_change_nothing(world: World, wrong: TenantSums) -> None:
    second = world.attach()
    with pytest.raises(MessageRefused, match="at most"):
        say(world, second, sums("y", 1), wrong)
    assert heard(world, world.session) == [Planners(ONE, (second,))]
    assert world.core.state.sessions[second].served is None


def test_a_session_names_so_many_tenants_and_no_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell, "TENANTS_TOLD_MAX", 3)
    assert messages.TENANTS_TOLD_MAX > 3
    say(world, world.session, sums("a"), sums("b"), is_whole=True)
    say(world, world.session, sums("c"), sums("a", 1))
    with pytest.raises(MessageRefused, match="more than 3 tenants"):
        say(world, world.session, sums("d"))
    say(world, world.session, sums("d"), sums("e"), sums("f"), is_whole=True)
    assert len(world.core.state.sessions[world.session].served or ()) == 3
