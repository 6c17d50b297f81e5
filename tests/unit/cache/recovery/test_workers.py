"""Workers without a restart of the cache: registration, reconnects, dead epochs, rule 9."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coppice.handles import make_generation
from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import (
    Abandon,
    Acquire,
    Candidate,
    Extended,
    Gone,
    Grant,
    Invalid,
    LeaseDigest,
    NoCapacity,
    NoCapacityReason,
    Pending,
    Release,
    Wake,
)
from coppice.messages.registration import Draining, Fence, FenceAck
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.results import Reincarnate, ToWorkerEffect, WorkerEnded
from tests.unit.cache.world import (
    ALICE,
    NAMESPACE,
    V,
    W,
    World,
    epoch_of_core,
    lease_id,
    registration,
    same_pool,
    settings,
    tokens,
)


def test_a_new_pool_opens_at_once_under_a_minted_epoch() -> None:
    world = World()
    answer = world.register(registration())
    assert (answer.worker_epoch, answer.cache_epoch) == (epoch_of_core(world.core, 1), 1)
    assert world.core.stats().workers[0].open
    assert world.register(registration(V)).worker_epoch == epoch_of_core(world.core, 2)


def test_a_reconnect_keeps_the_state_and_repeats_the_fences() -> None:
    world = World(num_blocks=8)
    world.fill(1, tokens(8))
    world.granted(2, tokens(9))
    world.do(Abandon(lease_id(2)))
    world.granted(3, tokens(9))
    before, told = world.core.stats(), len(world.fences())
    assert world.register(same_pool(world)).worker_epoch == before.workers[0].worker_epoch
    assert world.core.stats() == before
    assert world.fences()[told:] == world.fences()[:told] != []


def test_a_draining_worker_is_announced_until_a_new_registration() -> None:
    world = World(num_blocks=8)
    epoch = world.core.state.workers[W].epoch

    def announced() -> list[bool]:
        return [info.draining for info in world.core.state.workers_message().workers]

    world.core.receive_worker(W, Draining(WorkerEpoch(epoch + 1)), world.now_ns)
    assert announced() == [False], "a word of another worker epoch"
    world.core.receive_worker(W, Draining(epoch), world.now_ns)
    assert announced() == [True]
    world.register(replace(same_pool(world), draining=True))
    assert announced() == [True]
    world.register(registration())
    assert announced() == [False]


BOTH = (("w", 0), ("v", 100))  # the first is cheaper


@pytest.mark.parametrize("says", ["a word", "a registration"])
def test_a_worker_that_drains_is_granted_no_new_lease_and_keeps_those_it_has(says: str) -> None:
    world = World(num_blocks=8)
    world.register(registration(V, num_blocks=8))
    world.granted(1, tokens(8), candidates=BOTH)
    drain(world, says)
    assert world.granted(2, tokens(8), candidates=BOTH).worker_id == V
    refused = world.acquire(3, tokens(4))
    assert isinstance(refused, NoCapacity)
    assert refused.reason is NoCapacityReason.NO_WORKER
    assert isinstance(world.extend(1, 12), Extended), "what runs there goes on"
    world.register(same_pool(world))
    assert world.granted(4, tokens(4)).worker_id == W, "it takes new leases again"


@pytest.mark.parametrize("says", ["a word", "a registration"])
def test_who_waits_at_a_worker_that_drains_is_woken_and_placed_elsewhere(says: str) -> None:
    world = World(settings(flight_tokens_min=8), num_blocks=32)
    world.register(registration(V, num_blocks=32))
    candidates = tuple(Candidate(WorkerId(name), cost) for name, cost in BOTH)
    first, second = (
        Acquire(lease_id(number), ALICE, NAMESPACE, tokens(32), 33, candidates, may_wait=True) for number in (1, 2)
    )
    assert isinstance(world.do(first), Grant)
    assert isinstance(world.do(second), Pending)
    drain(world, says)
    assert Wake(world.core.cache_epoch, (lease_id(2),)) in world.told(world.session)
    answer = world.do(second)
    assert isinstance(answer, Grant)
    assert answer.worker_id == V


@pytest.mark.parametrize("says", ["a word", "a registration"])
def test_what_only_a_worker_that_drains_can_hold_is_not_said_to_fit_nowhere(says: str) -> None:
    world = World(num_blocks=8)
    world.register(registration(V, num_blocks=4))
    drain(world, says)
    refused = [world.acquire(number, tokens(4 * 5), candidates=BOTH[number:]) for number in (0, 1)]
    assert [answer.reason for answer in refused if isinstance(answer, NoCapacity)] == [
        NoCapacityReason.NO_WORKER,
        NoCapacityReason.NEVER_FITS,
    ]


def drain(world: World, says: str) -> None:
    if says == "a registration":
        world.register(replace(same_pool(world), draining=True))
    else:
        world.core.receive_worker(W, Draining(world.core.state.workers[W].epoch), world.now_ns)
        world.collect()


def test_a_worker_may_lag_behind_grants_and_seals() -> None:
    world = World(num_blocks=8)
    grant = world.granted(1, tokens(12))
    world.publish(1, 0, tokens(4))
    generations = world.core.state.workers[W].ledger.generation.tobytes()
    lagging = registration(num_blocks=8, epoch=grant.worker_epoch, highest=1, generations=generations[:8] + bytes(56))
    assert world.register(lagging).worker_epoch == grant.worker_epoch
    assert world.core.stats().leases == 1


def test_a_report_may_be_older_than_a_publication() -> None:
    world = World(num_blocks=8)
    grant = world.granted(1, tokens(4))
    before = registration(num_blocks=8, epoch=grant.worker_epoch, highest=1)
    world.publish(1, 0, tokens(4))
    assert world.register(before).worker_epoch == grant.worker_epoch
    world.tick(20_000, alive=(world.session,))
    world.granted(2, tokens(4, 50))
    world.publish(2, 0, tokens(4, 50))
    assert world.register(before).worker_epoch != grant.worker_epoch


@pytest.mark.parametrize("damage", ["ahead", "behind a cached block", "another seal", "another size"])
def test_a_difference_that_cannot_be_explained_ends_the_epoch(damage: str) -> None:
    world = World(num_blocks=8)
    world.fill(1, tokens(8))
    world.tick(20_000, alive=(world.session,))
    world.fill(2, tokens(8, 100))
    old = world.core.state.workers[W].epoch
    generations = bytearray(world.core.state.workers[W].ledger.generation.tobytes())
    seals = bytearray(world.core.state.workers[W].ledger.seals)
    size = 8
    if damage == "ahead":
        generations[8 * 7] = 1
    elif damage == "behind a cached block":
        generations[0] -= 1
    elif damage == "another seal":
        seals[0] ^= 1
    else:
        size, generations, seals = 4, generations[:32], seals[:64]
    report = registration(num_blocks=size, epoch=old, highest=1, generations=bytes(generations), seals=bytes(seals))
    assert world.register(report).worker_epoch > old
    assert WorkerEnded(W, old) in world.log
    assert world.core.match(ALICE, NAMESPACE, tokens(9), W).num_blocks == 0


def test_the_death_of_a_worker_ends_its_leases() -> None:
    world = World(num_blocks=8)
    world.granted(1, tokens(4))
    world.granted(2, tokens(4))
    world.do(Abandon(lease_id(2)))
    fence = world.fences()[0]
    world.tick(10_100, alive=(world.session,), workers=False)
    assert world.core.stats().workers == ()
    assert world.extend(1, 8) == Gone(lease_id(1))
    assert LeaseDigest(0, 0) in world.told(world.session)[-2:]
    world.register(registration(num_blocks=8, highest=1))
    world.ack(fence)
    assert world.core.stats().free_blocks == 8
    assert isinstance(world.acquire(2, tokens(4)), Grant)


def test_a_dead_epoch_that_comes_back_gets_a_new_one() -> None:
    world = World(num_blocks=8)
    world.fill(1, tokens(8))
    report = same_pool(world)
    world.tick(10_100, alive=(world.session,), workers=False)
    answer = world.register(report)
    assert answer.worker_epoch > report.worker_epoch
    assert world.core.stats().workers[0].open
    grant = world.granted(2, tokens(32))
    assert grant.num_cached_tokens == 0
    assert grant.worker_epoch == answer.worker_epoch


def test_acks_of_another_worker_epoch_change_nothing() -> None:
    world = World(num_blocks=8)
    world.granted(1, tokens(4))
    world.do(Abandon(lease_id(1)))
    (fence,) = world.fences()
    world.ack(Fence(fence.fence_id, WorkerEpoch(fence.worker_epoch + 1)))
    world.ack(Fence(fence.fence_id + 1, fence.worker_epoch))
    world.ack(fence, V)
    assert world.core.stats().draining_blocks == 1


def test_the_nodes_of_a_dead_worker_are_taken_apart_in_slices() -> None:
    world = World(settings(nodes_dismantled_per_tick=2), num_blocks=64)
    for number in range(8):
        world.fill(number, tokens(8, number * 100))
    tree = world.core.state.workers[W].trees[ALICE, NAMESPACE]
    world.core.end_worker(W, world.now_ns)
    slices = 0
    while world.core.state.dismantling:
        world.core.tick(world.now_ns)
        slices += 1
    assert slices >= 4
    assert not tree.children


def test_limits_of_a_registration() -> None:
    world = World(
        settings(workers_max=1, blocks_per_worker_max=8, block_size_max=4, name_bytes_max=8, sessions_max=1),
        num_blocks=8,
    )
    refused = [
        (registration(V, num_blocks=8), "maximum"),
        (registration(num_blocks=9), "num_blocks"),
        (registration(num_blocks=8, block_size=5), "block_size"),
        (registration(WorkerId("ninechars"), num_blocks=8), "longer"),
        (registration(num_blocks=8, generations=bytes(8)), "need"),
        (registration(num_blocks=1, generations=b"\xff" * 8), "40 bits"),
        (registration(num_blocks=8, schedulers=(1, 2)), "epochs"),
    ]
    for message, text in refused:
        with pytest.raises(MessageRefused, match=text):
            world.core.receive_worker(message.worker_id, message, world.now_ns)
    with pytest.raises(MessageRefused, match="registers as"):
        world.core.receive_worker(V, registration(num_blocks=8), world.now_ns)
    assert world.core.stats().workers[0].worker_id == W


# rule 9


def test_a_worker_that_saw_a_higher_epoch_calls_for_a_new_incarnation() -> None:
    granted = make_generation(CacheEpoch(4), 9).to_bytes(8, "little")
    traces = (
        registration(V, epoch=(1 << 32) | 1, highest=4, incarnation=1),
        registration(V, epoch=(4 << 32) | 1, highest=4, incarnation=1),
        registration(V, epoch=(1 << 32) | 1, highest=4, incarnation=1, num_blocks=1, generations=granted),
    )
    for message in traces:
        world = World(epoch=4)
        world.register(registration())
        world.session = world.attach()
        world.core.receive_worker(V, message, world.now_ns)
        assert Reincarnate(CacheEpoch(5)) in world.collect()
        assert V not in world.core.state.workers
        answer = world.acquire(1, tokens(4))
        assert isinstance(answer, NoCapacity)
        assert answer.reason is NoCapacityReason.NO_WORKER


def test_nothing_is_extended_while_a_new_incarnation_is_due() -> None:
    world = World(num_blocks=8)
    world.granted(1, tokens(4))
    world.core.receive_worker(V, registration(V, epoch=(9 << 32) | 1, highest=9), world.now_ns)
    world.core.receive_worker(V, registration(V, epoch=(3 << 32) | 1, highest=3), world.now_ns)
    assert [e for e in world.collect() if isinstance(e, Reincarnate)] == [Reincarnate(CacheEpoch(10))]
    assert isinstance(world.extend(1, 8), NoCapacity)


def test_our_own_epoch_on_a_worker_that_we_registered_is_no_reason() -> None:
    world = World(num_blocks=8)
    world.granted(1, tokens(4))
    world.register(registration(num_blocks=8, highest=1))
    assert not [e for e in world.log if isinstance(e, Reincarnate)]
    world.granted(2, tokens(4))
    assert isinstance(world.extend(2, 8), Extended)


def test_effects_are_taken_once() -> None:
    world = World()
    world.core.receive_worker(W, registration(), world.now_ns)
    assert any(isinstance(effect, ToWorkerEffect) for effect in world.core.take_effects())
    assert world.core.take_effects() == []
    world.core.receive_worker(W, FenceAck(1, WorkerEpoch(1)), world.now_ns)
    assert world.core.take_effects() == []
    assert isinstance(world.core.execute(SchedulerEpoch(1), Release(lease_id(1)), 0), object)
    assert isinstance(world.acquire(1, tokens(4), session=SchedulerEpoch(1)), Invalid)
