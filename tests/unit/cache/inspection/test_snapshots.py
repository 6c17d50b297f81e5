"""Slices of a snapshot with changes in between, together with the events, give what the trees have."""

from __future__ import annotations

from random import Random

import pytest

from coppice.messages.index import Grant
from coppice.seals import NO_SEAL, chain_key, chain_seals
from coppice_cache.core.base.events import Cleared, IndexEvent, Removed, Stored, Tier
from coppice_cache.core.inspection.snapshots import Cursor
from coppice_cache.core.pool.free_ring import unpack_handles
from coppice_cache.core.radix.tree import Node
from tests.unit.cache.host_tier.tier_world import PROMPT, demoted
from tests.unit.cache.world import ALICE, KEY, MS, NAMESPACE, World, settings, tokens

Follower = dict[int, bytes]  # handle -> seal


def apply(found: Follower, events: list[IndexEvent] | list[Stored]) -> None:
    for event in events:
        match event:
            case Stored():
                seals = [event.seals[i : i + 16] for i in range(0, len(event.seals), 16)]
                found.update(zip(unpack_handles(event.handles), seals, strict=True))
            case Removed():
                for handle in unpack_handles(event.handles):
                    found.pop(handle, None)
            case Cleared():
                found.clear()  # one worker and one domain are all there is here


def truth(world: World) -> Follower:
    """What can be found, by walking the trees."""
    found: Follower = {}
    for worker in world.core.state.workers.values():
        for tree in worker.trees.values():
            waiting: list[Node] = [tree] if worker.is_current(tree) else []
            while waiting:
                node = waiting.pop()
                waiting += node.children.values()
                for handle in unpack_handles(node.handles):
                    found[handle] = worker.ledger.seal(handle & 0xFFFFFF)
    return found


class Busy:
    """A world in which prompts with common beginnings come and go, blocks are evicted, and now and then all is lost."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.world = World(settings(record_events=True), num_blocks=40)
        self.leases: list[int] = []
        self.next = 1

    def do_something(self) -> None:
        roll = self.rng.random()
        if roll < 0.6 or not self.leases:
            start = self.rng.choice((0, 0, 1000))
            prompt = tokens(4 * self.rng.randrange(1, 5), start) + tokens(
                4 * self.rng.randrange(4), self.rng.choice((500, 700))
            )
            answer = self.world.acquire(self.next, prompt, reserve=len(prompt) // 4)
            if isinstance(answer, Grant):
                self.world.publish(self.next, 0, prompt[: len(prompt) // 16 * 16])
                self.leases.append(self.next)
            self.next += 1
        elif roll < 0.93:
            self.world.release(self.leases.pop(self.rng.randrange(len(self.leases))))
        elif roll < 0.98:
            self.world.core.invalidate(domain=ALICE, now_ns=self.world.now_ns)
        else:
            self.world.now_ns += 100 * MS
            self.world.core.tick(self.world.now_ns)
        self.world.collect()

    def rest(self) -> None:
        """What a lease still reads of an invalidated tree is told of when the lease ends."""
        for number in self.leases:
            self.world.release(number)
        self.world.tick(200)


@pytest.mark.parametrize("seed", range(40))
def test_slices_and_events_give_what_can_be_found(seed: int) -> None:
    busy = Busy(seed)
    core = busy.world.core
    for _ in range(busy.rng.randrange(40)):
        busy.do_something()
    core.take_events()
    logged: Follower = {}  # slices and events in the order in which they were made
    slices: list[Stored] = []
    since: list[IndexEvent] = []
    cursor: Cursor | None = None
    while True:
        events, cursor = core.snapshot_slice(cursor, 2)
        slices += events
        logged.update((h, b"") for event in events for h in unpack_handles(event.handles))
        if cursor is None:
            break
        for _ in range(busy.rng.randrange(3)):
            busy.do_something()
        told = core.take_events()
        since += told
        for event in told:
            _apply_unordered(logged, event)
    for _ in range(busy.rng.randrange(20)):
        busy.do_something()
    busy.rest()
    told = core.take_events()
    for event in told:
        _apply_unordered(logged, event)
    followed: Follower = {}
    for run in slices:
        assert run.parent_seal in {*followed.values(), b""}, "a run comes before the one that it continues"
        apply(followed, [run])
    apply(followed, since + told)
    assert followed == truth(busy.world)
    assert logged.keys() >= truth(busy.world).keys()


def _apply_unordered(found: Follower, event: IndexEvent) -> None:
    if isinstance(event, Cleared):
        found.clear()
        return
    for handle in unpack_handles(event.handles):
        if isinstance(event, Stored):
            found[handle] = b""
        else:
            found.pop(handle, None)


def test_a_subtree_that_is_forgotten_loses_its_edge_at_once_and_the_rest_when_it_is_taken_apart() -> None:
    world = World(settings(record_events=True), num_blocks=16)
    world.fill(1, tokens(16))
    found: Follower = {}
    apply(found, world.core.take_events())
    assert len(found) == 4
    world.core.invalidate(domain=ALICE, namespace=NAMESPACE, tokens=tokens(8), now_ns=world.now_ns)
    apply(found, world.core.take_events())
    world.tick(200)
    apply(found, world.core.take_events())
    assert found == truth(world)
    assert len(found) == 1


def test_a_core_tells_nothing_unless_it_is_asked_to() -> None:
    world = World(num_blocks=8)
    world.fill(1, tokens(8))
    assert world.core.take_events() == []


def test_a_worker_that_dies_takes_all_with_it() -> None:
    world = World(settings(record_events=True), num_blocks=8)
    world.fill(1, tokens(8))
    world.core.take_events()
    world.core.end_worker(world.core.state.workers.copy().popitem()[0], world.now_ns)
    assert [type(event) for event in world.core.take_events()] == [Cleared]


def test_a_snapshot_tells_of_the_host_tier_too() -> None:
    core = demoted().core
    seals = chain_seals(chain_key(KEY, ALICE, NAMESPACE), NO_SEAL, PROMPT, 16)
    told: list[Stored] = []
    events, cursor = core.snapshot_slice(None, 1)
    while cursor is not None:
        told += events
        events, cursor = core.snapshot_slice(cursor, 1)
    told += events
    host = [event for event in told if event.tier is Tier.HOST and event.tokens == PROMPT]
    assert [(event.parent_seal, event.seals, len(event.handles)) for event in host] == [(b"", seals, 32)]
    assert any(event.tier is Tier.DEVICE for event in told)
    assert len({(event.tier, event.handles) for event in told}) == len(told), "each run once"
