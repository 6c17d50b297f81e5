"""Distrust: what a worker refused leaves the tree at once, and its blocks stay with whoever reads them."""

from __future__ import annotations

from random import Random

import pytest

from coppice.ids import DomainId, SchedulerEpoch
from coppice.messages.index import (
    Abandon,
    Distrust,
    Distrusted,
    Grant,
    Invalid,
    NotPublished,
    NotPublishedReason,
    Published,
)
from coppice_cache.core.base.settings import DomainConfig, Mode
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, lease_id, settings, tokens

BOB = DomainId("bob")


def distrust(world: World, number: int, handles: bytes, session: SchedulerEpoch | None = None) -> None:
    assert world.do(Distrust(lease_id(number), handles), session) == Distrusted(lease_id(number))


def found(world: World, data: bytes, domain: DomainId = ALICE) -> int:
    return world.core.match(domain, NAMESPACE, data + tokens(1, 7), W).num_blocks


def states(world: World) -> tuple[int, int, int, int]:
    stats = world.core.stats()
    return stats.free_blocks, stats.leased_blocks, stats.cached_blocks, stats.draining_blocks


@pytest.fixture
def world() -> World:
    """Sixteen blocks of 4 tokens; the four blocks of `tokens(16)` are cached."""
    world = World(num_blocks=16)
    world.fill(1, tokens(16))
    return world


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_accused_block_and_all_below_it_are_found_no_more(world: World, at: int) -> None:
    grant = world.granted(2, tokens(17))
    distrust(world, 2, grant.shared[8 * at : 8 * at + 8])
    assert found(world, tokens(16)) == at
    assert world.granted(3, tokens(17)).shared == grant.shared[: 8 * at]


def test_blocks_that_are_read_stay_until_their_last_reader_ends(world: World) -> None:
    world.fill(2, tokens(16) + tokens(8, 50))
    first, second = world.granted(3, tokens(17)), world.granted(4, tokens(17))
    assert first.shared == second.shared
    distrust(world, 3, first.shared[8:16])
    assert states(world) == (10, 2, 4, 0), "two blocks below, read by nobody, are free"
    world.release(3)
    assert states(world) == (11, 1, 4, 0)
    world.release(4)
    assert states(world) == (15, 0, 1, 0)
    assert found(world, tokens(16)) == 1


def test_the_same_prefix_may_be_published_again_beside_what_is_still_read(world: World) -> None:
    old = world.granted(2, tokens(17))
    distrust(world, 2, old.shared[:8])
    world.fill(3, tokens(16))
    new = world.granted(4, tokens(17))
    assert new.num_cached_tokens == 16
    assert not {old.shared[at : at + 8] for at in range(0, 32, 8)} & {new.shared[at : at + 8] for at in range(0, 32, 8)}
    world.release(2)
    assert found(world, tokens(16)) == 4
    assert states(world) == (11, 1, 4, 0)


def test_a_leaf_above_what_was_accused_does_not_grow_under_its_reader(world: World) -> None:
    world.granted(2, tokens(8) + tokens(4, 90))
    grant = world.granted(3, tokens(17))
    distrust(world, 3, grant.shared[16:24])
    assert isinstance(world.publish(2, 2, tokens(4, 90)), Published)
    assert found(world, tokens(8) + tokens(4, 90)) == 3
    assert found(world, tokens(16)) == 2
    world.release(3)
    world.release(2)


def test_only_the_same_generation_on_the_own_path_counts(world: World) -> None:
    world.fill(2, tokens(16, 100))
    other = world.granted(3, tokens(17, 100))
    world.granted(4, tokens(17))
    distrust(world, 4, other.shared)
    later = (int.from_bytes(other.shared[:8], "little") + (1 << 24)).to_bytes(8, "little")
    distrust(world, 3, later + bytes(8))
    assert (found(world, tokens(16)), found(world, tokens(16, 100))) == (4, 4)


def test_own_blocks_are_no_entries(world: World) -> None:
    grant = world.granted(2, tokens(24))
    before = states(world)
    distrust(world, 2, grant.owned)
    assert states(world) == before
    assert found(world, tokens(16)) == 4


def test_leases_that_are_over_or_of_others_change_nothing(world: World) -> None:
    grant = world.granted(2, tokens(17))
    stranger = world.attach()
    distrust(world, 2, grant.shared, stranger)
    distrust(world, 9, grant.shared)
    distrust(world, 9, grant.shared, SchedulerEpoch(12345))
    world.release(2)
    distrust(world, 2, grant.shared)
    assert found(world, tokens(16)) == 4


def test_saying_it_again_changes_nothing(world: World) -> None:
    grant = world.granted(2, tokens(17))
    world.granted(3, tokens(17))
    distrust(world, 2, grant.shared[:8])
    world.fill(4, tokens(16))
    distrust(world, 2, grant.shared[:8])
    distrust(world, 3, grant.shared)
    assert found(world, tokens(16)) == 4


def test_cut_handles_are_invalid(world: World) -> None:
    grant = world.granted(2, tokens(17))
    assert isinstance(world.do(Distrust(lease_id(2), grant.shared[:9])), Invalid)
    assert found(world, tokens(16)) == 4


def test_a_lease_below_publishes_no_more_but_extends(world: World) -> None:
    grant = world.granted(2, tokens(20))
    distrust(world, 2, grant.shared[:8])
    assert world.publish(2, 4, tokens(4, 16)) == NotPublished(lease_id(2), NotPublishedReason.TREE_GONE)
    world.extend(2, 40)
    world.release(2)
    assert states(world) == (16, 0, 0, 0)


def test_a_drain_pin_keeps_the_blocks_until_the_fence(world: World) -> None:
    grant = world.granted(2, tokens(17))
    world.granted(3, tokens(17))
    distrust(world, 2, grant.shared[8:16])
    world.do(Abandon(lease_id(2)))
    world.release(3)
    assert states(world) == (11, 0, 4, 1)
    world.ack(world.fences()[-1])
    assert states(world) == (15, 0, 1, 0)


def test_the_end_of_the_session_frees_everything_behind_its_fence(world: World) -> None:
    grant = world.granted(2, tokens(17))
    distrust(world, 2, grant.shared[:8])
    world.core.end_client(world.session, world.now_ns)
    world.collect()
    assert states(world) == (11, 0, 4, 1)
    world.ack(world.fences()[-1])
    assert states(world) == (16, 0, 0, 0)
    assert world.core.stats().nodes == 0


@pytest.mark.parametrize("seed", range(12))
def test_random_work_with_distrust_keeps_every_invariant(seed: int) -> None:
    """The core's own check runs after every op; in the end everything comes back."""
    rng = Random(seed)
    config = settings(DomainConfig(BOB, mode=Mode.PRIVATE, guarantee_share=0.3, zero_on_change=True))
    world = World(config, num_blocks=24)
    live: dict[int, tuple[Grant, bytes, int]] = {}
    accused: set[int] = set()
    for number in range(1, 150):
        kind = rng.random()
        if kind < 0.4 or not live:
            data = b"".join(tokens(4, 10 * rng.randrange(2)) for _ in range(rng.randrange(1, 6))) + tokens(2, 99)
            answer = world.acquire(number, data, domain=rng.choice((ALICE, BOB)))
            if isinstance(answer, Grant):
                shared = {
                    int.from_bytes(answer.shared[at : at + 8], "little") for at in range(0, len(answer.shared), 8)
                }
                assert not shared & accused, "an accused block was found again"
                live[number] = (answer, data, answer.num_cached_tokens // 4)
            continue
        chosen = rng.choice(list(live))
        grant, data, done = live[chosen]
        if kind < 0.65:
            end = rng.randrange(done, len(data) // 16 + 1)
            if end > done and isinstance(world.publish(chosen, done, data[16 * done : 16 * end]), Published):
                live[chosen] = (grant, data, end)
        elif kind < 0.8 and grant.shared:
            at = 8 * rng.randrange(len(grant.shared) // 8)
            distrust(world, chosen, grant.shared[at : at + 8])
            accused.add(int.from_bytes(grant.shared[at : at + 8], "little"))
        else:
            world.release(chosen)
            del live[chosen]
    for number in live:
        world.release(number)
    assert states(world)[1] == states(world)[3] == 0
