"""Sessions without a restart of the cache: epochs, expiry and its fence, digests, our own pauses."""

from __future__ import annotations

import pytest

from coppice.ids import CacheEpoch, SchedulerEpoch
from coppice.messages.index import (
    Abandon,
    Gone,
    Grant,
    LeaseDigest,
    LeaseSet,
    NoCapacity,
    OpBatch,
    Reattach,
    Reattached,
    Workers,
    lease_hash,
)
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.results import SessionEnded
from tests.unit.cache.world import MS, V, W, World, epoch_of_core, lease_id, registration, settings, tokens


def test_epochs_are_minted_above_those_of_earlier_cache_epochs() -> None:
    world = World(num_blocks=4)
    assert [world.attach(), world.attach()] == [epoch_of_core(world.core, 2), epoch_of_core(world.core, 3)]
    assert World(epoch=2).attach() > world.attach()


def test_a_live_epoch_is_kept_and_a_dead_one_is_replaced() -> None:
    world = World(num_blocks=4)
    assert world.attach(world.session) == world.session
    world.core.end_client(world.session, world.now_ns)
    assert SessionEnded(world.session) in world.collect()
    assert world.attach(world.session) != world.session


def test_an_epoch_of_the_future_is_not_kept() -> None:
    world = World(num_blocks=4)
    assert world.attach(5 << 32) == epoch_of_core(world.core, 2)


def test_workers_are_told_on_attach_and_on_change() -> None:
    world = World(num_blocks=4)
    assert next(m for m in world.told(world.session) if isinstance(m, Workers)).workers[0].open
    world.register(registration(V))
    assert {info.worker_id for info in world.told(world.session)[-1].workers} == {W, V}  # type: ignore[attr-defined]
    world.core.end_worker(W, world.now_ns)
    world.collect()
    assert [info.worker_id for info in world.told(world.session)[-1].workers] == [V]  # type: ignore[attr-defined]


def test_expiry_drains_until_the_fence_is_acknowledged() -> None:
    world = World(num_blocks=8)
    world.fill(1, tokens(8))
    world.granted(2, tokens(13))
    session = world.session
    world.tick(9_900)
    assert not world.fences()
    world.tick(200)
    assert SessionEnded(session) in world.log
    (fence,) = world.fences()
    assert fence.scheduler_epochs == (session,)
    stats = world.core.stats()
    assert (stats.draining_blocks, stats.cached_blocks, stats.leases, stats.pins) == (2, 2, 0, 1)
    world.session = world.attach(session)
    assert world.session != session
    assert isinstance(world.acquire(3, tokens(24, 900)), NoCapacity)
    world.ack(fence)
    stats = world.core.stats()
    assert (stats.draining_blocks, stats.cached_blocks, stats.pins, stats.free_blocks) == (0, 2, 0, 6)


def test_a_drain_pin_protects_cached_blocks() -> None:
    world = World(num_blocks=8)
    world.fill(1, tokens(16))
    world.granted(2, tokens(17))
    world.core.end_client(world.session, world.now_ns)
    world.collect()
    world.session = world.attach()
    world.granted(3, tokens(12, 900))
    assert isinstance(world.acquire(4, tokens(4, 990)), NoCapacity)
    world.ack(world.fences()[0])
    assert isinstance(world.acquire(4, tokens(8, 990)), Grant)


def test_heartbeats_keep_a_session() -> None:
    world = World(num_blocks=8)
    world.tick(60_000, alive=(world.session,))
    assert not [e for e in world.log if isinstance(e, SessionEnded)]


def test_the_digest_follows_the_leases() -> None:
    world = World(num_blocks=8)
    world.granted(1, tokens(4))
    world.granted(2, tokens(4))
    world.tick(1_000, alive=(world.session,))
    expected = LeaseDigest(2, lease_hash(lease_id(1)) ^ lease_hash(lease_id(2)))
    assert world.told(world.session)[-1] == expected
    world.tick(400, alive=(world.session,))
    world.release(1)
    world.tick(600, alive=(world.session,))
    digests = [m for m in world.told(world.session) if isinstance(m, LeaseDigest)]
    assert digests == [expected, LeaseDigest(1, lease_hash(lease_id(2)))]


def test_a_lease_set_reconciles_both_sides() -> None:
    world = World(num_blocks=8)
    world.granted(1, tokens(4))
    world.granted(2, tokens(4))
    world.core.receive_client(world.session, LeaseSet((lease_id(2), lease_id(9))), world.now_ns)
    world.collect()
    assert world.told(world.session)[-1] == Reattached(CacheEpoch(1), (), (lease_id(9),))
    (fence,) = world.fences()
    assert fence.lease_ids == (lease_id(1),)
    assert world.extend(1, 8) == Gone(lease_id(1))
    assert world.core.stats().draining_blocks == 1
    world.ack(fence)
    assert world.core.stats().free_blocks == 7


def test_abandon_goes_through_one_fence_for_the_whole_batch() -> None:
    world = World(num_blocks=8)
    for number in (1, 2):
        world.granted(number, tokens(4, number * 50))
    batch = OpBatch((Abandon(lease_id(1)), Abandon(lease_id(2))))
    world.core.receive_client(world.session, batch, world.now_ns)
    world.collect()
    (fence,) = world.fences()
    assert fence.lease_ids == (lease_id(1), lease_id(2))
    assert world.core.stats().draining_blocks == 2
    assert world.acquire(1, tokens(4)) == Gone(lease_id(1))
    world.ack(fence)
    world.ack(fence)
    assert world.core.stats().free_blocks == 8
    assert isinstance(world.acquire(1, tokens(4)), Grant)


def test_our_own_pause_expires_nobody() -> None:
    world = World(num_blocks=8)
    world.granted(1, tokens(4))
    world.tick(1_000, alive=(world.session,))
    world.now_ns += 60_000 * MS
    world.core.tick(world.now_ns)
    world.collect()
    assert world.core.stats().sessions == 1
    assert world.core.stats().workers
    world.tick(9_900, workers=False)
    assert world.core.stats().sessions == 1
    world.tick(1_100, workers=False)
    assert (world.core.stats().sessions, world.core.stats().workers) == (0, ())


def test_what_is_heard_after_a_pause_counts_from_then() -> None:
    world = World(num_blocks=8)
    world.now_ns += 60_000 * MS
    world.core.heard_client(world.session, world.now_ns)
    world.core.tick(world.now_ns)
    world.tick(10_100)
    assert world.core.stats().sessions == 0


def test_expiries_are_spread_over_ticks() -> None:
    world = World(settings(expiries_per_tick=2), num_blocks=8)
    for _ in range(4):
        world.core.attach_client(SchedulerEpoch(0), world.now_ns, plans=False)
    world.now_ns += 900 * MS
    for _ in range(11):
        world.now_ns += 900 * MS
        world.core.heard_worker(W, world.now_ns)
        world.core.tick(world.now_ns)
    assert world.core.stats().sessions == 3
    world.core.tick(world.now_ns)
    assert world.core.stats().sessions == 1


def test_messages_of_unknown_sessions_name_what_is_gone() -> None:
    world = World(num_blocks=8)
    stranger = SchedulerEpoch(99)
    world.core.receive_client(stranger, LeaseSet((lease_id(1),)), world.now_ns)
    world.core.receive_client(stranger, Reattach(()), world.now_ns)
    world.collect()
    assert world.told(stranger) == [Reattached(CacheEpoch(1), (), (lease_id(1),)), Reattached(CacheEpoch(1), (), ())]


def test_a_lease_set_over_the_limit_is_refused() -> None:
    world = World(settings(leases_per_session_max=1), num_blocks=8)
    ids = (lease_id(1), lease_id(2))
    with pytest.raises(MessageRefused, match="at most 1"):
        world.core.receive_client(world.session, LeaseSet(ids), world.now_ns)
