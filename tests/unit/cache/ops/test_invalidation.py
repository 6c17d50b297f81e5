"""What is invalidated is found by nobody from the same moment on; its memory comes back later, and first."""

from __future__ import annotations

import pytest

from coppice.ids import CacheEpoch, DomainId, Namespace
from coppice.messages.index import Distrust, Grant, NotPublished, NotPublishedReason, Published
from coppice.seals import NO_CHAIN_KEY
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.settings import DomainConfig, Eviction, Mode
from coppice_cache.core.index import IndexCore
from coppice_cache.core.radix.tree import Tree
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, lease_id, registration, settings, tokens

BOB = DomainId("bob")
OTHER = Namespace(b"model-b")
BLOCK = 4
PROMPT = tokens(24)


@pytest.fixture
def here() -> World:
    return World(num_blocks=64, block_size=BLOCK)


def found(here: World, data: bytes = PROMPT, domain: DomainId = ALICE, namespace: Namespace = NAMESPACE) -> int:
    return here.core.match(domain, namespace, data + tokens(1, 9_000), W).num_cached_tokens


def invalidate(here: World, **what: object) -> int:
    count = here.core.invalidate(now_ns=here.now_ns, **what)  # type: ignore[arg-type]
    here.collect()
    return count


def fill_four(here: World) -> None:
    for number, (domain, namespace) in enumerate([(ALICE, NAMESPACE), (ALICE, OTHER), (BOB, NAMESPACE), (BOB, OTHER)]):
        here.fill(number, PROMPT, domain=domain, namespace=namespace)


@pytest.mark.parametrize(
    ("what", "gone"),
    [
        ({"domain": ALICE}, {(ALICE, NAMESPACE), (ALICE, OTHER)}),
        ({"namespace": OTHER}, {(ALICE, OTHER), (BOB, OTHER)}),
        ({"domain": BOB, "namespace": OTHER}, {(BOB, OTHER)}),
        ({}, {(ALICE, NAMESPACE), (ALICE, OTHER), (BOB, NAMESPACE), (BOB, OTHER)}),
        ({"domain": DomainId("nobody")}, set()),
    ],
)
def test_by_domain_by_namespace_by_both_and_all(here: World, what: dict[str, object], gone: set[object]) -> None:
    fill_four(here)
    assert invalidate(here, **what) == len(gone)
    for key in [(ALICE, NAMESPACE), (ALICE, OTHER), (BOB, NAMESPACE), (BOB, OTHER)]:
        assert found(here, PROMPT, *key) == (0 if key in gone else 24), key
    assert invalidate(here, **what) == 0, "nothing was findable any more"


def test_what_is_published_afterwards_is_found(here: World) -> None:
    here.fill(1, PROMPT)
    invalidate(here, domain=ALICE)
    assert here.granted(2, PROMPT).num_cached_tokens == 0
    here.publish(2, 0, PROMPT)
    here.release(2)
    assert found(here) == 24


def test_a_lease_of_before_reads_on_but_publishes_no_more(here: World) -> None:
    here.fill(1, PROMPT)
    grant = here.granted(2, PROMPT + tokens(4, 500), reserve=40)
    assert grant.num_cached_tokens == 24
    invalidate(here, domain=ALICE)
    answer = here.publish(2, 6, tokens(4, 500))
    assert answer == NotPublished(grant.lease_id, NotPublishedReason.TREE_GONE)
    assert here.core.stats().cached_blocks == 6, "what a live lease reads stays"
    here.release(2)
    here.tick(1_000)
    assert here.core.stats().cached_blocks == 0


def test_a_new_tree_beside_a_lease_of_the_old_one(here: World) -> None:
    here.granted(1, PROMPT)
    invalidate(here, domain=ALICE)
    here.granted(2, PROMPT)
    assert isinstance(here.publish(2, 0, PROMPT), Published)
    assert isinstance(here.publish(1, 0, PROMPT), NotPublished)
    here.release(1)
    here.release(2)
    assert found(here) == 24


def test_the_memory_comes_back_lazily(here: World) -> None:
    here.fill(1, PROMPT)
    invalidate(here, domain=ALICE)
    assert here.core.stats().cached_blocks == 6, "nothing is walked when it is invalidated"
    here.tick(1_000)
    assert here.core.stats().cached_blocks == 0
    assert here.core.stats().nodes == 0


def test_the_invalidated_are_the_first_victims() -> None:
    here = World(num_blocks=12, block_size=BLOCK)
    here.fill(1, PROMPT, namespace=OTHER)
    here.fill(2, PROMPT)
    invalidate(here, namespace=NAMESPACE)
    assert isinstance(here.acquire(3, tokens(24, 700)), Grant)
    assert found(here, PROMPT, ALICE, OTHER) == 24, "a valid tree gave way, though an invalid one was there"


def test_a_subtree(here: World) -> None:
    here.fill(1, PROMPT)
    here.fill(2, PROMPT[:32] + tokens(8, 300))
    assert invalidate(here, domain=ALICE, namespace=NAMESPACE, tokens=PROMPT[:48]) == 1
    assert found(here) == 8, "up to where the subtree hung"
    assert found(here, PROMPT[:32] + tokens(8, 300)) == 16
    here.tick(1_000)
    assert here.core.stats().cached_blocks == 4


def test_a_subtree_that_is_read(here: World) -> None:
    here.fill(1, PROMPT)
    here.granted(2, PROMPT + tokens(4, 500), reserve=28)
    here.granted(3, PROMPT[:32] + tokens(4, 600), reserve=12)
    invalidate(here, domain=ALICE, namespace=NAMESPACE, tokens=PROMPT[:48])
    here.tick(1_000, alive=(here.session,))
    assert found(here) == 8
    assert isinstance(here.publish(2, 6, tokens(4, 500)), NotPublished)
    assert isinstance(here.publish(3, 2, tokens(4, 600)), Published)
    here.release(2)
    here.tick(1_000, alive=(here.session,))
    assert here.core.stats().cached_blocks == 3
    here.release(3)


def test_the_cut_block_may_be_written_anew_at_once(here: World) -> None:
    here.fill(1, PROMPT)
    invalidate(here, domain=ALICE, namespace=NAMESPACE, tokens=PROMPT[:16])
    here.fill(2, PROMPT)
    assert found(here) == 24
    here.tick(1_000)
    assert found(here) == 24


def test_tokens_need_a_tree_and_whole_blocks(here: World) -> None:
    here.fill(1, PROMPT)
    with pytest.raises(MessageRefused, match="domain and namespace"):
        invalidate(here, domain=ALICE, tokens=PROMPT)
    with pytest.raises(MessageRefused, match="packed u32"):
        invalidate(here, domain=ALICE, namespace=NAMESPACE, tokens=PROMPT[:15])
    assert invalidate(here, domain=ALICE, namespace=NAMESPACE, tokens=tokens(8, 4_000)) == 0, "nothing is there"
    assert found(here) == 24


def test_every_worker_forgets(here: World) -> None:
    here.register(registration("v", num_blocks=16, block_size=BLOCK))  # type: ignore[arg-type]
    here.fill(1, PROMPT)
    here.fill(2, PROMPT, candidates=(("v", 0),))
    assert invalidate(here, domain=ALICE) == 2
    assert found(here) == 0
    assert here.core.match(ALICE, NAMESPACE, PROMPT, "v").num_cached_tokens == 0  # type: ignore[arg-type]


def test_the_last_reader_of_what_was_cut_off_leaves_a_leaf_above_that_can_be_evicted() -> None:
    here = World(num_blocks=16, block_size=BLOCK)
    here.granted(1, tokens(16))
    here.publish(1, 0, tokens(16))
    for number, length in ((2, 5), (3, 9)):  # each leaves an edge split at its end
        here.fill(number, tokens(length))
    invalidate(here, domain=ALICE, namespace=NAMESPACE, tokens=tokens(8))
    here.release(1)
    assert found(here) == 4
    assert isinstance(here.acquire(4, tokens(64, 900)), Grant)
    assert found(here) == 0


def test_what_is_reaped_beyond_the_need_of_the_moment_is_counted() -> None:
    """An invalidated node goes as a whole, although only what its domain borrowed was to be taken."""
    here = World(settings(DomainConfig(ALICE, guarantee_blocks=4)), num_blocks=24, block_size=BLOCK)
    here.fill(1, tokens(32))
    here.fill(2, tokens(12, 500), domain=BOB)
    here.granted(4, tokens(36, 700), domain=DomainId("carol"))
    invalidate(here, domain=ALICE, namespace=NAMESPACE, tokens=tokens(4))
    assert isinstance(here.acquire(3, tokens(60, 900)), Grant)


def test_distrust_within_what_was_invalidated_leaves_nothing_behind() -> None:
    here = World(num_blocks=16, block_size=BLOCK)
    here.granted(1, tokens(16))
    here.publish(1, 0, tokens(16))
    second = here.granted(2, tokens(17)).shared[8:16]
    invalidate(here, domain=ALICE)
    here.tick(1_000, alive=(here.session,))
    here.do(Distrust(lease_id(2), second))
    here.release(1)
    here.release(2)
    assert here.core.stats().cached_blocks == 0


def test_what_was_invalidated_goes_before_anything_valid_however_deep_it_is() -> None:
    here = World(settings(eviction=Eviction.LRU), num_blocks=16, block_size=BLOCK)
    valid = tokens(16, 800)
    here.fill(1, valid)  # the coldest
    for number in range(1, 6):  # a chain of five nodes: each is held when the next one comes
        here.granted(number, tokens(4 * number + 1))
        here.publish(number, 0, tokens(4 * number))
    for number in range(1, 6):
        here.release(number)
    invalidate(here, domain=ALICE, namespace=NAMESPACE, tokens=tokens(4))
    here.granted(20, tokens(32, 900))
    assert found(here, valid) == 16


@pytest.mark.parametrize("others", [0, 40])
def test_a_strict_domain_has_its_memory_back_whatever_others_have_to_be_taken_apart(others: int) -> None:
    """Non-interference: when its blocks become free decides what it loses next."""
    limits = settings(DomainConfig(BOB, mode=Mode.STRICT, guarantee_blocks=8), nodes_dismantled_per_tick=4)
    here = World(limits, num_blocks=64, block_size=BLOCK)
    here.fill(500, tokens(16), domain=BOB)
    for number in range(others):
        here.fill(number, tokens(4, 100 * number), namespace=Namespace(b"%d" % number))
    invalidate(here)
    here.tick()
    bob = here.core.state.workers[W].quotas.accounts[BOB]
    assert (bob.cached, bob.deferred_free) == (0, [])


def test_the_next_incarnation_keeps_what_operators_said(here: World) -> None:
    """A worker may call for one before it has registered; what the log tells of it waits on."""
    here.core.pin("system", ALICE, NAMESPACE, PROMPT, here.now_ns)
    invalidate(here, domain=BOB)
    second = IndexCore(settings(), CacheEpoch(2), here.now_ns)
    second.dismantle(here.core)
    assert [view.name for view in second.pins()] == ["system"]
    tree = Tree(BOB, NAMESPACE, NO_CHAIN_KEY, 4 * BLOCK)
    second.receive_worker(W, registration(), here.now_ns)
    assert not second.state.workers[W].is_current(tree), "it was grown before the invalidation"
