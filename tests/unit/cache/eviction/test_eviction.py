"""Eviction policies: who is named, what is never lost, and that nobody else has a say."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from coppice.ids import DomainId, Namespace
from coppice.messages.index import Grant
from coppice.messages.reuse import Reuse
from coppice.seals import NO_CHAIN_KEY
from coppice_bench.trace.file import Request, Trace
from coppice_bench.trace.policies import lru
from coppice_bench.trace.replay import Replay, replay
from coppice_cache.core.base.settings import DomainConfig, Eviction, Mode
from coppice_cache.core.eviction import hazard, samples
from coppice_cache.core.eviction.adaptive import AdaptivePolicy
from coppice_cache.core.eviction.hazard import HazardModel, features
from coppice_cache.core.eviction.policy import NO_HINT, EvictionPolicy, LruPolicy
from coppice_cache.core.radix.tree import Node, Tree, add_child, walk
from tests.unit.cache.world import ALICE, World, settings, tokens

POLICIES = (AdaptivePolicy, LruPolicy)
BLOCK = 8

prompts = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 6)).map(
        lambda shape: tuple(range(shape[0] * 100, shape[0] * 100 + shape[1])) + ((7_000 + shape[2],) * (shape[2] > 2))
    ),
    min_size=1,
    max_size=60,
)


def distinct(found: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Equal ids mean equal prompts up to there, so an id carries its past."""
    return [tuple(hash(prompt[: end + 1]) & ((1 << 62) - 1) for end in range(len(prompt))) for prompt in found]


class Watched(Replay):
    """Asks after every request whether the policy holds exactly what can be evicted."""

    def watch(self) -> None:
        below: list[Node] = [self._tree]
        evictable = set()
        for node in below:
            below.extend(node.children.values())
            assert self._policy.holds(node) or not node.is_evictable, "an evictable leaf is lost"
            if node.is_evictable:
                evictable.add(id(node))
        named = self._policy.next_victims(sum(node.num_blocks for node in below))
        assert {id(node) for node in named} == evictable
        if named:
            assert self._policy.coldest() is named[0]


@pytest.mark.parametrize("make", POLICIES)
@hypothesis_settings(max_examples=60, deadline=None)
@given(found=prompts, capacity=st.integers(1, 12))
def test_every_evictable_leaf_is_held_and_nothing_else_is_named(
    make: Callable[[], EvictionPolicy], found: list[tuple[int, ...]], capacity: int
) -> None:
    run = Watched(make(), capacity)
    for number, prompt in enumerate(distinct(found), 1):
        run.request(prompt, number, ends_in_part=number % 3 == 0)
        assert run.num_cached <= capacity
        run.watch()


@hypothesis_settings(max_examples=60, deadline=None)
@given(found=prompts, capacity=st.integers(5, 12))
def test_lru_hits_what_a_plain_lru_hits(found: list[tuple[int, ...]], capacity: int) -> None:
    ids = distinct(found)
    trace = Trace(tuple(Request(0, 0, prompt) for prompt in ids if prompt), 0)
    if trace.requests:
        assert replay(trace, LruPolicy(), capacity).hits == lru(ids, capacity)


def conversations(count: int) -> Trace:
    """Every third prompt comes back longer, after a while; the others are one of a kind."""
    requests: list[Request] = []
    next_id = 1
    for number in range(count):
        fresh = tuple(range(next_id, next_id + 6))
        next_id += 6
        known = requests[number - 40].hash_ids[:6] if number >= 40 and number % 3 == 1 else (0,)
        requests.append(Request(number * 50, 0, (*known, *fresh)))
    return Trace(tuple(requests), 0)


def test_the_same_history_has_the_same_hits_and_clocks_have_no_say() -> None:
    trace = conversations(600)
    slow = Trace(tuple(Request(request.at_ms * 97, 0, request.hash_ids) for request in trace.requests), 0)
    first, second = (replay(trace, AdaptivePolicy(), 120).hits for _ in range(2))
    assert first == second == replay(slow, AdaptivePolicy(), 120).hits


def test_what_is_used_often_outlives_floods() -> None:
    """Twenty prompts come back now and then, each time after more blocks of others than an LRU can hold."""
    requests, next_id = [], 1_000
    for number in range(3_000):
        next_id += 8
        prompt = tuple(range(number // 10 % 20 * 5, number // 10 % 20 * 5 + 5)) if number % 10 == 0 else None
        requests.append(Request(number, 0, prompt or tuple(range(next_id, next_id + 8))))
    trace = Trace(tuple(requests), 0)
    plain, adaptive = (replay(trace, make(), 400).hits for make in (LruPolicy, AdaptivePolicy))
    assert plain == 0
    assert adaptive > 1_000


def test_ghosts_and_samples_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "SAMPLES_MAX", 50)
    policy = AdaptivePolicy()
    replay(conversations(500), policy, 60)
    assert len(policy._samples) <= 50
    assert 0 < policy._samples.num_ghosts <= len(policy._samples)


def test_lessons_raise_and_lower_the_rate() -> None:
    model = HazardModel()
    often, once = (features(uses, 4, access=hazard.USED, hint=0, call_kind=0) for uses in (9, 1))
    for _ in range(400):
        model.learn(often, 6, 1, was_used=True)
        model.learn(once, 6, 1, was_used=False)
    for _ in range(50):
        ranking = model.ranking()
    assert model.level(often) > model.level(once)
    cells = [6 * hazard.NUM_LEVELS + model.level(seen) for seen in (once, often)]
    assert ranking.rank[cells[0]] < ranking.rank[cells[1]]
    assert sorted(ranking.rank) == list(range(hazard.NUM_CELLS))


def leaves(policy: EvictionPolicy, count: int) -> list[Node]:
    tree = Tree(DomainId("d"), Namespace(b""), NO_CHAIN_KEY, BLOCK)
    found = []
    for number in range(count):
        data = array("q", [number]).tobytes()
        policy.touched([], 1, NO_HINT, number, number + 1)
        leaf = add_child(tree, data, data, block_bytes=BLOCK, now_ns=number + 1)
        policy.created(leaf, data + bytes(8), 1, NO_HINT)
        policy.offer(leaf)
        found.append(leaf)
    assert walk(tree, data, BLOCK).num_blocks == 1
    return found


@pytest.mark.parametrize("make", POLICIES)
def test_what_is_retained_goes_last_by_priority_until_its_time(make: Callable[[], EvictionPolicy]) -> None:
    policy = make()
    found = leaves(policy, 6)
    policy.retain(found[:1], 9, until_ns=100)
    policy.retain(found[1:3], 2, until_ns=50)
    order = policy.next_victims(6)
    assert set(order[:3]) == set(found[3:])
    assert order[3:] == [found[1], found[2], found[0]]
    policy.touched([], 0, NO_HINT, 6, 50)
    assert policy.next_victims(6)[-1] is found[0]
    assert set(policy.next_victims(5)) == set(found[1:])
    policy.touched([], 0, NO_HINT, 6, 100)
    assert all(leaf.retained is None for leaf in found)
    assert set(policy.next_victims(6)) == set(found)


def evictions_of_a_strict_domain(others: int) -> list[int]:
    strict = DomainConfig(ALICE, mode=Mode.STRICT, guarantee_share=0.5)
    world = World(settings(strict, eviction=Eviction.ADAPTIVE), num_blocks=24)
    seen = []
    for number in range(120):
        if others:
            data = tokens(12, number * 7 % (40 * others))
            lease = 10_000 + number
            reuse = tuple(Reuse)[number % 3]
            if isinstance(world.acquire(lease, data, domain=DomainId("noisy"), reuse=reuse, call_kind=2), Grant):
                world.publish(lease, 0, data)
                world.release(lease)
        prompt = tokens(8, number * number % 13 * 50)
        grant = world.granted(number, prompt + tokens(1), call_kind=2)
        seen.append(grant.num_cached_tokens)
        world.publish(number, 0, prompt)
        world.release(number)
    return seen


def test_what_a_strict_domain_loses_depends_on_itself_alone() -> None:
    alone = evictions_of_a_strict_domain(0)
    assert alone == evictions_of_a_strict_domain(1) == evictions_of_a_strict_domain(3)
    assert len(set(alone)) > 1, "nothing was ever hit, or nothing was ever lost"
