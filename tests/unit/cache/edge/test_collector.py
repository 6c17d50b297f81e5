"""Memory without the cyclic collector: what is over is cut apart, so that reference counting frees it."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest

from coppice.ids import CacheEpoch
from coppice.messages.index import Distrust
from coppice_cache.core.index import IndexCore
from coppice_cache.core.radix.tree import Node
from coppice_cache.edge.service import collector
from coppice_cache.edge.service.collector import Collector
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


@pytest.fixture
def unfrozen() -> Iterator[None]:
    """As in a process that has just begun."""
    gc.unfreeze()
    yield
    gc.freeze()


def num_frozen(things: list[list[int]]) -> int:
    """How many of these no collection looks at. A count of all frozen objects would fall whenever any of them dies."""
    looked_at = {id(thing) for generation in range(3) for thing in gc.get_objects(generation=generation)}
    return sum(id(thing) not in looked_at for thing in things)


def test_what_others_had_frozen_stays_so() -> None:
    gc.freeze()
    ours = Collector()
    ours.start()
    ours.stop()
    assert gc.isenabled()
    assert gc.get_freeze_count()


def test_survivors_are_frozen_and_everything_is_put_back(monkeypatch: pytest.MonkeyPatch, unfrozen: None) -> None:
    monkeypatch.setattr(collector, "SURVIVORS_MAX", 100_000)
    assert gc.isenabled()
    ours = Collector()
    ours.start()
    try:
        assert not gc.isenabled()
        ours.tick()
        few = [[number] for number in range(900)]
        ours.tick()
        assert num_frozen(few) == 0, "not yet"
        many = [[number] for number in range(110_000)]
        ours.tick()
        assert num_frozen(few) == len(few)
        assert num_frozen(many) == len(many)
    finally:
        ours.stop()
    assert gc.isenabled()
    assert num_frozen(few) == 0


def test_who_builds_a_tuple_beside_it_is_not_disturbed() -> None:
    """A tuple that is built from a generator may be looked at by nobody else meanwhile."""
    failures: list[SystemError] = []
    over = threading.Event()

    def build() -> None:
        while not over.is_set():
            try:
                tuple([number] for number in range(40))
            except SystemError as error:
                failures.append(error)

    builder, ours, interval_s = threading.Thread(target=build), Collector(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    builder.start()
    ours.start()
    try:
        for _ in range(30_000):
            ours.tick()
    finally:
        ours.stop()
        over.set()
        builder.join()
        sys.setswitchinterval(interval_s)
    assert not failures
