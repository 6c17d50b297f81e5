"""The default policy is not below LRU where its model is wrong, and above it where the model is right."""

from __future__ import annotations

from array import array
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from coppice.ids import DomainId, Namespace
from coppice.seals import NO_CHAIN_KEY
from coppice_bench.trace import generated
from coppice_bench.trace.file import Trace
from coppice_bench.trace.policies import lru
from coppice_bench.trace.replay import Replay, replay
from coppice_cache.core.eviction import miniatures
from coppice_cache.core.eviction.adaptive import AdaptivePolicy
from coppice_cache.core.eviction.floor import Floor
from coppice_cache.core.eviction.hazard import NUM_LEVELS, age_ranking, bucket_of, buckets_of
from coppice_cache.core.eviction.miniatures import Miniatures
from coppice_cache.core.radix.tree import Tree, add_child, split_edge, walk
from tests.unit.cache.eviction.test_eviction import Watched, conversations, distinct, prompts

BLOCK = 8


def points(trace: Trace, capacity: int) -> float:
    """Of the default policy above LRU, in percent of blocks."""
    ids = [request.hash_ids for request in trace.requests]
    return 100 * (replay(trace, AdaptivePolicy(), capacity).hit_rate - lru(ids, capacity) / trace.num_blocks)


@pytest.mark.long
@pytest.mark.parametrize("capacity", [500, 1_000, 2_000, 5_000, 10_000, 20_000])
@pytest.mark.parametrize("name", generated.GENERATED)
def test_no_load_is_served_worse_than_by_lru(name: str, capacity: int) -> None:
    assert points(generated.GENERATED[name](3, 6000), capacity) > -0.2


def test_where_age_alone_is_right_it_decides() -> None:
    """And would not, if the floor were not: the model takes prompts that grow for ones that come back."""
    trace = generated.agents(1, 4000)
    assert points(trace, 2000) > -0.5
    policy = AdaptivePolicy()
    replay(trace, policy, 2000)
    assert policy._by_age


def test_where_age_alone_is_wrong_the_model_decides() -> None:
    trace = generated.twice(1, 3000)
    policy = AdaptivePolicy()
    replay(trace, policy, 500)
    assert not policy._by_age
    assert points(trace, 500) > 5


@pytest.mark.parametrize("name", ["recent", "chat", "phases"])
def test_by_age_it_hits_what_lru_hits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for ages that share a tick, and for a leaf that crosses a little late."""
    monkeypatch.setattr(Miniatures, "prefers_age", lambda caches, now: True)
    assert abs(points(generated.GENERATED[name](5, 3000), 600)) < 0.3


@hypothesis_settings(max_examples=60, deadline=None)
@given(found=prompts, capacity=st.integers(1, 12))
def test_by_age_it_names_every_evictable_leaf(found: list[tuple[int, ...]], capacity: int) -> None:
    policy = AdaptivePolicy()
    policy._by_age, policy._is_ranked = True, False
    run = Watched(policy, capacity)
    for number, prompt in enumerate(distinct(found), 1):
        run.request(prompt, number, ends_in_part=False)
        run.watch()


def test_the_ranking_by_age_is_one() -> None:
    ranking = age_ranking()
    assert sorted(ranking.rank) == sorted(ranking.cell) == list(range(len(ranking.rank)))
    assert all(ranking.cell[rank] == cell for cell, rank in enumerate(ranking.rank))
    assert ranking.rank[9 * NUM_LEVELS + 31] < ranking.rank[8 * NUM_LEVELS]


# -- the small caches


def filled(num_cached: int, accesses: int, seed: int = 1) -> Miniatures:
    random, caches = Random(seed), Miniatures()
    caches.fit(num_cached)
    for clock in range(accesses):
        seal = random.randrange(4 * num_cached).to_bytes(16, "little")
        if caches.samples(seal):
            caches.used(seal, random.randrange(NUM_LEVELS), clock)
        if caches.is_over:
            caches.make_room(age_ranking(), 0, 47, clock)
    return caches


@pytest.mark.parametrize("num_cached", [10, 900, 5_000, 300_000])
def test_they_stay_small(num_cached: int) -> None:
    caches = filled(num_cached, 20_000)
    assert len(caches._by_hazard) <= caches._capacity + miniatures._BATCH <= miniatures.BLOCKS_MAX + miniatures._BATCH
    assert len(caches._by_age) <= len(caches._by_hazard) + miniatures._BATCH
    assert len(caches._by_hazard._keys) <= 2 * (miniatures.BLOCKS_MAX + miniatures._BATCH)


def test_a_domain_that_grows_is_sampled_more_thinly() -> None:
    caches = filled(2_000, 8_000)
    before = [set(caches._by_age), set(caches._by_hazard._places)]
    assert not caches.fit(2_000)
    assert caches.fit(9_000)
    after = [set(caches._by_age), set(caches._by_hazard._places)]
    assert after == [{seal for seal in known if caches.samples(seal)} for known in before] != before
    assert not caches.fit(100), "a domain that shrinks samples what it did"


def test_who_is_ahead_decides() -> None:
    caches = Miniatures()
    assert not caches.prefers_age(now=False)
    caches.age_ahead = 3
    assert caches.prefers_age(now=False), "at once"
    caches.hazard_ahead = 5
    assert caches.prefers_age(now=True), "two more are chance"
    caches.hazard_ahead = 30
    assert not caches.prefers_age(now=True)
    assert not caches.prefers_age(now=False)


def test_marks_follow_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through splits, growth and losses: what is told is used is what was stored there."""
    floor = Floor()
    floor.caches.fit(100)
    tree = Tree(DomainId("d"), Namespace(b""), NO_CHAIN_KEY, BLOCK)
    ids = array("q", range(40)).tobytes()
    seals = b"".join(number.to_bytes(16, "little") for number in range(40))
    node = add_child(tree, ids, ids, block_bytes=BLOCK, now_ns=1)
    floor.stored(node, seals, 0)
    told: list[bytes] = []
    monkeypatch.setattr(Miniatures, "used", lambda caches, seal, level, clock: told.append(seal))
    stored = [seals[at : at + 16] for at in range(0, len(seals), 16) if floor.caches.samples(seals[at : at + 16])]
    assert 3 < len(stored) < 30
    upper = split_edge(walk(tree, ids[: 17 * BLOCK], BLOCK), BLOCK)
    floor.split(upper, node)
    floor.used([upper, node], 1)
    assert told == stored[::-1], "deepest first"
    told.clear()
    node.trim(10, BLOCK)
    floor.used([upper, node], 2)
    assert told == [seal for seal in stored if int.from_bytes(seal, "little") < 30][::-1]
    floor.forget(node)
    floor.forget(upper)
    assert len(floor) == 0


def test_nothing_is_kept_of_runs_that_are_gone() -> None:
    policy = AdaptivePolicy()
    run = Replay(policy, 60)
    for request in conversations(500).requests:
        run.request(request.hash_ids, request.at_ms + 1, ends_in_part=False)
    assert all(node.handles for node in policy._floor._marks)
    assert 0 < len(policy._floor) <= 60


def test_the_array_of_buckets_is_as_one_by_one() -> None:

    ages = [*range(3000), 10**5, 10**6, 1 << 30]
    assert buckets_of(np.array(ages, np.int64)).tolist() == [bucket_of(age) for age in ages]


@pytest.mark.parametrize("blocks", [3, 300])
def test_what_one_request_shows_is_one_observation(blocks: int) -> None:
    """However many blocks it has: age takes over by the second one, the model by the fifth."""
    for_age, for_model = Miniatures(), Miniatures()
    by_age = []
    for _ in range(5):
        for_age.age_ahead += blocks
        for_model.hazard_ahead += blocks
        for_age.begin()
        for_model.begin()
        by_age.append((for_age.prefers_age(now=False), for_model.prefers_age(now=True)))
    assert by_age == [(False, True), (True, True), (True, True), (True, True), (True, False)]
