"""Ledger and eviction: which block, under which generation, and which goes first."""

from __future__ import annotations

from random import Random
from struct import unpack

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from coppice.handles import COUNTER_MAX, block_ids, block_of, epoch_of, generation_of, make_generation
from coppice.ids import CacheEpoch, DomainId
from coppice.messages.index import Extended, NoCapacityReason
from coppice_cache.core.base.errors import InvariantBroken
from coppice_cache.core.base.settings import CoreSettings, DomainConfig, Eviction, Mode
from coppice_cache.core.pool.ledger import BlockState
from tests.unit.cache.world import ALICE, KEY, W, World, cached, reason, registration, settings, tokens

BOB, CAROL = DomainId("bob"), DomainId("carol")
STRICT = Mode.STRICT


# ledger


def test_generations_rise_and_carry_the_cache_epoch() -> None:
    world = World(epoch=7, num_blocks=1)
    seen = []
    for number in range(4):
        (handle,) = unpack("<Q", world.granted(number, tokens(4)).owned)
        seen.append(generation_of(handle))
        world.release(number)
    assert seen == [make_generation(CacheEpoch(7), counter) for counter in (1, 2, 3, 4)]


def test_a_used_up_counter_is_never_granted_again() -> None:
    world = World(epoch=3, num_blocks=2)
    world.granted(1, tokens(8))
    ledger = world.core.state.workers[W].ledger
    world.release(1)
    ledger.generation[0] = make_generation(CacheEpoch(3), COUNTER_MAX - 1)
    (handle, _) = unpack("<2Q", world.granted(2, tokens(8)).owned)
    assert generation_of(handle) == make_generation(CacheEpoch(3), COUNTER_MAX)
    world.release(2)
    world.core.check()
    assert ledger.num_free == 1
    for number in range(3, 6):
        assert list(block_ids(world.granted(number, tokens(4)).owned)) == [1]
        assert reason(world.acquire(99, tokens(4))) is NoCapacityReason.POOL_FULL
        world.release(number)


def test_a_pool_that_was_used_before_gets_higher_generations() -> None:
    world = World(epoch=2)
    old = make_generation(CacheEpoch(1), 77).to_bytes(8, "little")
    world.register(registration(num_blocks=2, epoch=(1 << 32) | 1, highest=1, generations=old * 2))
    world.session = world.attach()
    world.tick(11_000, alive=(world.session,))
    world.ack(world.fences()[-1], generations=old * 2, seals=bytes(32))
    (handle, _) = unpack("<2Q", world.granted(1, tokens(8)).owned)
    assert epoch_of(generation_of(handle)) == 2


def zeroed(world: World, number: int, domain: DomainId, count: int = 2) -> int:
    """Acquire `count` blocks; returns how many of them must be zeroed, and gives them back."""
    grant = world.granted(number, tokens(4 * count, number * 100), domain=domain)
    assert set(unpack(f"<{len(grant.zero) // 8}Q", grant.zero)) <= set(unpack(f"<{count}Q", grant.owned))
    world.release(number)
    return len(grant.zero) // 8


def test_zeroing_when_the_domain_asks_on_either_side() -> None:
    world = World(settings(DomainConfig(ALICE, zero_on_change=True)), num_blocks=2)
    assert [zeroed(world, n, d) for n, d in enumerate((BOB, CAROL, ALICE, ALICE, BOB, CAROL))] == [0, 0, 2, 2, 2, 2]


def test_what_was_to_be_zeroed_is_so_until_it_is_published() -> None:
    """The lease may have ended before the worker was told to zero anything."""
    world = World(settings(DomainConfig(ALICE, zero_on_change=True)), num_blocks=2)
    assert [zeroed(world, 1, BOB), zeroed(world, 2, ALICE), zeroed(world, 3, ALICE)] == [0, 2, 2]
    world.fill(4, tokens(8, 400), domain=ALICE)
    assert zeroed(world, 5, ALICE) == 0


def test_strict_blocks_are_zeroed_always() -> None:
    world = World(settings(DomainConfig(ALICE, mode=STRICT, guarantee_share=0.5)), num_blocks=4)
    assert [zeroed(world, 1, ALICE), zeroed(world, 2, ALICE)] == [2, 2]
    assert [zeroed(world, 3, BOB), zeroed(world, 4, BOB)] == [2, 2]
    assert [zeroed(world, 5, BOB), zeroed(world, 6, BOB)] == [2, 2], "nobody has said that they were zeroed"


def test_extended_blocks_are_zeroed_too() -> None:
    world = World(settings(DomainConfig(ALICE, mode=STRICT, guarantee_share=1.0)), num_blocks=4)
    world.granted(1, tokens(4), domain=ALICE)
    answer = world.extend(1, 8)
    assert isinstance(answer, Extended)
    assert answer.zero == answer.owned != b""


def test_unknown_content_of_before_a_restart_is_zeroed_when_anybody_cares() -> None:
    for configs, expected in (((DomainConfig(BOB, zero_on_change=True),), 2), ((), 0)):
        world = World(settings(*configs), epoch=2)
        old = make_generation(CacheEpoch(1), 77).to_bytes(8, "little")
        arrays = {"generations": old * 2, "seals": bytes(32)}
        world.register(registration(num_blocks=2, epoch=(1 << 32) | 1, highest=1, generations=old * 2))
        world.session = world.attach()
        world.tick(11_000, alive=(world.session,))
        world.ack(world.fences()[-1], **arrays)
        assert zeroed(world, 1, ALICE) == expected


# eviction


def test_the_least_recently_used_leaf_goes_first() -> None:
    world = World(settings(eviction=Eviction.LRU), num_blocks=6)
    first, second, third = tokens(8, 100), tokens(8, 200), tokens(8, 300)
    for number, data in enumerate((first, second, third)):
        world.fill(number, data)
    world.fill(4, first + tokens(1))
    world.granted(5, tokens(8, 500))
    assert [cached(world, data) for data in (first, second, third)] == [2, 0, 2]


def test_the_end_of_a_lease_counts_as_use() -> None:
    world = World(settings(eviction=Eviction.LRU), num_blocks=6)
    first, second = tokens(8, 100), tokens(8, 200)
    for number, data in ((1, first), (2, second)):
        world.granted(number, data)
        world.publish(number, 0, data)
    world.release(2)
    world.release(1)
    world.granted(3, tokens(16, 500))
    assert (cached(world, first), cached(world, second)) == (2, 0)


def test_an_acquire_counts_as_use_even_when_its_session_expires() -> None:
    world = World(num_blocks=6)
    first, second = tokens(8, 100), tokens(8, 200)
    for number, data in ((1, first), (2, second)):
        world.fill(number, data)
    world.granted(3, first + tokens(1))
    world.core.end_client(world.session, world.now_ns)
    world.collect()
    world.ack(world.fences()[0])
    world.session = world.attach()
    world.granted(4, tokens(16, 500))
    assert (cached(world, first), cached(world, second)) == (2, 0)


def test_tails_are_trimmed_block_by_block() -> None:
    world = World(num_blocks=6)
    world.fill(1, tokens(24))
    for number in range(4):
        world.granted(10 + number, tokens(4, 1_000 + 10 * number))
        assert cached(world, tokens(24)) == 5 - number
    assert world.core.stats().evicted_blocks == 4


def test_leaves_go_before_their_parents() -> None:
    world = World(num_blocks=6)
    stem = tokens(8)
    world.fill(1, stem + tokens(8, 100))
    world.fill(2, stem + tokens(8, 200))
    world.granted(3, tokens(12, 900))
    assert cached(world, stem) == 2
    assert cached(world, stem + tokens(8, 200)) == 3
    world.granted(4, tokens(12, 1_900))
    assert cached(world, stem) == 0


def test_a_pin_protects_its_whole_path() -> None:
    world = World(num_blocks=6)
    world.fill(1, tokens(16))
    world.granted(2, tokens(13))
    assert reason(world.acquire(3, tokens(12, 900))) is NoCapacityReason.POOL_FULL
    assert cached(world, tokens(16)) == 4
    world.granted(4, tokens(8, 900))
    assert cached(world, tokens(16)) == 3
    world.release(2)
    world.granted(5, tokens(8, 1_900))
    assert cached(world, tokens(16)) == 2


def test_a_refused_acquire_evicts_nothing() -> None:
    world = World(num_blocks=8)
    world.fill(1, tokens(16))
    world.granted(2, tokens(12, 500))
    before = world.core.tree(ALICE, max_depth=9, limit=99)
    assert reason(world.acquire(3, tokens(24, 900))) is NoCapacityReason.POOL_FULL
    assert reason(world.acquire(3, tokens(8) + tokens(17, 900))) is NoCapacityReason.POOL_FULL
    assert world.core.tree(ALICE, max_depth=9, limit=99) == before
    assert world.core.stats().evicted_blocks == 0


def test_what_an_acquire_matches_is_not_evicted_for_it() -> None:
    world = World(num_blocks=4)
    world.fill(1, tokens(12))
    assert reason(world.acquire(2, tokens(13), reserve=20)) is NoCapacityReason.NEVER_FITS
    assert len(world.granted(3, tokens(13), reserve=16).shared) == 24
    world.release(3)
    assert reason(world.acquire(4, tokens(8) + tokens(12, 50))) is NoCapacityReason.NEVER_FITS
    grant = world.granted(5, tokens(8) + tokens(8, 50))
    assert (len(grant.shared), len(grant.owned)) == (16, 16)


def test_the_eviction_heap_stays_small() -> None:
    world = World(settings(eviction=Eviction.LRU), num_blocks=8)
    world.fill(0, tokens(8))
    for number in range(1, 500):
        world.granted(number, tokens(9))
        world.release(number)
    queue = world.core.state.workers[W].quotas.accounts[ALICE].eviction
    assert len(queue) <= 70
    world.granted(999, tokens(32, 900))
    assert cached(world, tokens(8)) == 0


@hypothesis_settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
def test_eviction_follows_a_plain_lru(random: Random) -> None:
    """Disjoint one-block prompts: the order of eviction is the order of last use."""
    world = World(settings(eviction=Eviction.LRU), num_blocks=8)
    order: list[int] = []
    for number in range(40):
        prompt = random.randrange(14)
        hit = cached(world, tokens(4, prompt * 10)) == 1
        assert hit == (prompt in order)
        if hit:
            world.granted(number, tokens(5, prompt * 10), reserve=5)
            world.release(number)
            order.remove(prompt)
            order.append(prompt)
            spare = 7  # the second block of such a lease evicts the coldest when the pool is full
        else:
            world.fill(number, tokens(4, prompt * 10))
            order.append(prompt)
            spare = 8
        while len(order) > spare:
            order.remove(next(p for p in order if p != prompt))
        assert [p for p in range(14) if cached(world, tokens(4, p * 10))] == sorted(order)


# the check can fail


def broken(world: World) -> str:
    with pytest.raises(InvariantBroken) as caught:
        world.core.check()
    return caught.value.name


def test_the_check_sees_each_kind_of_damage() -> None:
    def fresh() -> World:
        world = World(num_blocks=8)
        world.fill(1, tokens(8))
        world.granted(2, tokens(9))
        return world

    world = fresh()
    world.core.state.workers[W].ledger.state[7] = BlockState.CACHED
    assert broken(world) == "I1"
    world = fresh()
    world.core.state.workers[W].ledger.free.append(7)
    assert broken(world) == "I1"
    world = fresh()
    next(iter(world.core.state.workers[W].leases.values())).node.pin(77)
    assert broken(world) == "I2"
    world = fresh()
    worker = world.core.state.workers[W]
    owners = worker.ledger.owners
    owners.index[0] = owners.index_of(worker.quotas.use_of(DomainConfig(BOB)))
    assert broken(world) == "I3"
    world = fresh()
    world.core.check()
    world.core.state.workers[W].ledger.generation[7] += 1
    world.core.check()
    world.core.state.workers[W].ledger.generation[7] -= 1
    assert broken(world) == "I4"
    world = fresh()
    world.core.state.workers[W].ledger.generation[0] += 1
    assert broken(world) == "I5"
    world = fresh()
    world.core.state.workers[W].num_nodes += 1
    assert broken(world) == "I11"
    world = fresh()
    world.core.state.workers[W].quotas.accounts[ALICE].maximum = 1
    assert broken(world) == "I13"


def test_handles_carry_their_block() -> None:
    world = World(num_blocks=8)
    owned = unpack("<3Q", world.granted(1, tokens(12)).owned)
    assert [block_of(handle) for handle in owned] == [0, 1, 2]


def test_the_key_of_the_tests_is_long_enough() -> None:
    assert CoreSettings(KEY).seal_key == KEY
