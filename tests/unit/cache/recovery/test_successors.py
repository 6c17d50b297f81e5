"""A scheduler that is gone for good: whoever comes after it ends its session, with the words that it was told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coppice.ids import SchedulerEpoch
from coppice.messages.index import Grant, NoCapacity
from coppice.messages.ownership import SessionName, Succeed
from coppice_cache.core.base.results import SessionEnded
from tests.unit.cache.restart import S1, Pool, Restarted
from tests.unit.cache.world import World, tokens

KEY, INCARNATION = b"k" * 16, 77


def name_of(world: World, epoch: SchedulerEpoch) -> SessionName:
    voucher = world.core.state.vouchers.of_session(KEY, INCARNATION, epoch)
    return SessionName(KEY, INCARNATION, epoch, voucher)


def succeed(world: World, by: SchedulerEpoch, name: SessionName) -> None:
    world.core.receive_client(by, Succeed(name), world.now_ns)
    world.collect()


def test_the_session_ends_at_once_and_its_blocks_come_back_through_the_fence() -> None:
    world = World(num_blocks=8)
    lost = world.session
    world.granted(1, tokens(32))
    world.session = world.attach()
    assert isinstance(world.acquire(2, tokens(32, 900)), NoCapacity)
    succeed(world, world.session, name_of(world, lost))
    assert SessionEnded(lost) in world.log
    (fence,) = world.fences()
    assert fence.scheduler_epochs == (lost,)
    assert isinstance(world.acquire(2, tokens(32, 900)), NoCapacity), "nothing is granted before the worker's word"
    world.ack(fence)
    assert isinstance(world.acquire(3, tokens(32, 900)), Grant)
    succeed(world, world.session, name_of(world, lost))
    assert not world.fences()[1:], "said again, it has no effect"


@pytest.mark.parametrize("wrong", [{"voucher": b"v" * 16}, {"key": b"q" * 16}, {"incarnation": 78}, {"voucher": b""}])
def test_without_the_words_that_it_was_told_nothing_ends(wrong: dict[str, object]) -> None:
    world = World(num_blocks=8)
    other = world.attach()
    succeed(world, other, replace(name_of(world, world.session), **wrong))  # type: ignore[arg-type]
    assert not world.fences()
    assert world.attach(world.session) == world.session


def test_who_names_its_own_session_says_goodbye() -> None:
    world = World(num_blocks=8)
    left = world.session
    succeed(world, left, SessionName(KEY, 0, left, b""))
    assert SessionEnded(left) in world.log
    assert world.attach(left) != left


def test_after_a_restart_nobody_waits_for_it_any_more() -> None:
    world = Restarted(Pool(), S1)
    assert not world.fences(), "its window is open"
    successor = world.attach()
    succeed(world, successor, name_of(world, S1))
    (fence,) = world.fences()
    assert S1 in fence.scheduler_epochs
    assert world.attach(S1) != S1, "it is dead"
