"""Memory without the cyclic collector: what is over is cut apart, so that reference counting frees it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from coppice.ids import CacheEpoch
from coppice.messages.index import Distrust
from coppice_cache.core.index import IndexCore
from coppice_cache.core.radix.tree import Node
from coppice_cache.edge.service.collector import THRESHOLDS, Collector
from tests.unit.cache.host_tier.test_disk_tier import settle, with_disk, worker_of
from tests.unit.cache.world import W, World, lease_id, settings, tokens


@pytest.fixture
def quiet() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_nodes() -> int:
    return sum(issubclass(type(thing), Node) for thing in gc.get_objects())


def take_apart(core: IndexCore) -> None:
    while core.state.dismantling:
        core.tick(0)


def with_orphans(world: World) -> None:
    """Leaves [b c], read by lease 2 and distrusted, with [d] below them, read by lease 3."""
    world.fill(1, tokens(12))
    world.fill(4, tokens(4) + tokens(4, 90))
    world.granted(2, tokens(13))
    world.fill(5, tokens(12) + tokens(4, 50))
    grant = world.granted(3, tokens(12) + tokens(5, 50))
    world.do(Distrust(lease_id(2), grant.shared[8:16]))


def test_nothing_of_a_dead_worker_is_left(quiet: None) -> None:
    before = num_nodes()
    world = World(num_blocks=32)
    with_orphans(world)
    assert num_nodes() > before + 3
    world.core.end_worker(W, world.now_ns)
    take_apart(world.core)
    world.log.clear()
    assert num_nodes() == before


def test_nothing_of_an_earlier_incarnation_is_left(quiet: None) -> None:
    before = num_nodes()
    world = World(num_blocks=32)
    with_orphans(world)
    second = IndexCore(settings(), CacheEpoch(2), world.now_ns)
    second.dismantle(world.core)
    del world
    take_apart(second)
    assert num_nodes() == before


@pytest.mark.parametrize("ends", [True, False], ids=["dead", "earlier"])
def test_nothing_of_lower_tiers_is_left(quiet: None, ends: bool) -> None:
    before = num_nodes()
    here = with_disk()
    for number in range(1, 8):
        here.fill(number, tokens(16, 1_000 * number))
        settle(here)
    assert all(store.num_nodes for store in worker_of(here).stores)
    assert num_nodes() > before + 3
    core = here.core
    if ends:
        core.end_worker(W, here.now_ns)
        core.tick(here.now_ns + 10**15)  # nor of what was set aside for its return
    else:
        core = IndexCore(settings(), CacheEpoch(2), here.now_ns)
        core.dismantle(here.core)
        del here
    take_apart(core)
    if ends:
        here.log.clear()
    assert num_nodes() == before


@pytest.fixture
def ours() -> Iterator[Collector]:
    """As in a process that has just begun."""
    gc.unfreeze()
    one = Collector()
    one.start()
    yield one
    one.stop()
    gc.freeze()


class Cycle:
    """One that only a collection frees."""

    def __init__(self) -> None:
        self.me = self


def num_full() -> int:
    return int(gc.get_stats()[2]["collections"])


def test_what_others_had_frozen_stays_so() -> None:
    gc.freeze()
    ours = Collector()
    ours.start()
    ours.stop()
    assert gc.isenabled()
    assert gc.get_freeze_count()


def test_what_lives_is_looked_at_twice_and_never_again(ours: Collector) -> None:
    before = num_full()
    kept = [[number] for number in range(200_000)]
    looked_at = {id(thing) for generation in range(2) for thing in gc.get_objects(generation=generation)}
    assert sum(id(thing) in looked_at for thing in kept) <= THRESHOLDS[0] * (THRESHOLDS[1] + 2)
    assert num_full() == before


def test_a_cycle_that_dies_soon_is_freed(ours: Collector) -> None:
    dead = weakref.ref(Cycle())
    assert dead() is not None
    kept = [[number] for number in range(2 * THRESHOLDS[0])]
    assert dead() is None
    assert kept


def test_everything_is_put_back_whoever_stops_first() -> None:
    before, others = gc.get_threshold(), (Collector(), Collector())
    for one in others:
        one.start()
    assert gc.get_threshold() == THRESHOLDS
    for one in others:
        one.stop()
    assert (gc.get_threshold(), gc.isenabled()) == (before, True)
    gc.disable()
    others[0].start()
    others[0].stop()
    assert not gc.isenabled()
    gc.enable()
