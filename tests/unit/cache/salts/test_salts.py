"""Salts inside of a domain: nothing is found across them, everything within one, and all of it goes when it should."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coppice.ids import DomainId, Namespace
from coppice.messages.index import Acquire, Candidate, MatchQueries, MatchQuery, Pending
from coppice.namespaces import digest_salt, salt_of, with_keyed_salt, with_salt, without_salt
from coppice_cache.core.base.events import Cleared
from coppice_cache.core.base.settings import DomainConfig
from tests.unit.cache.crash import After, Before, found
from tests.unit.cache.host_tier import tier_world as tiers
from tests.unit.cache.world import ALICE, KEY, NAMESPACE, W, World, lease_id, settings, tokens

BLOCK = 4
BOB = DomainId("bob")
PROMPT = tokens(4 * BLOCK + 1)


def named(text: str, domain: DomainId = ALICE) -> Namespace:
    """As a scheduler names it."""
    return with_salt(NAMESPACE, digest_salt(domain, text))


ONE, TWO = named("user 1"), named("user 2")


@pytest.fixture
def here() -> World:
    world = World(num_blocks=64, block_size=BLOCK)
    world.fill(1, PROMPT, namespace=ONE)
    return world


def cached(world: World, namespace: Namespace, data: bytes = PROMPT, domain: DomainId = ALICE) -> int:
    """Tokens that a prompt would find; all ways to ask agree."""
    found = world.core.match(domain, namespace, data, W).num_cached_tokens
    (hint,) = world.core.match_all(MatchQueries((MatchQuery(domain, namespace, data),))).hints
    assert max(hint.num_cached_tokens, default=0) == found
    number = 1_000 + world.now_ns // 1_000_000
    granted = world.granted(number, data, namespace=namespace, domain=domain).num_cached_tokens
    world.release(number)
    assert granted == found
    return found


def test_a_salt_finds_its_own_prefixes_and_nobody_elses(here: World) -> None:
    assert cached(here, ONE) == 16
    assert cached(here, TWO) == 0
    assert cached(here, NAMESPACE) == 0, "nor does who sends none"
    here.fill(2, PROMPT)
    assert cached(here, NAMESPACE) == 16
    assert cached(here, TWO) == 0, "what has no salt is found by no salt"


def test_two_domains_with_one_salt_share_nothing(here: World) -> None:
    assert cached(here, named("user 1", BOB), domain=BOB) == 0
    assert cached(here, ONE, domain=BOB) == 0, "though a scheduler named the other domain's salt"


def test_blocks_of_two_salts_have_different_seals(here: World) -> None:
    here.fill(2, PROMPT, namespace=TWO)
    here.fill(3, PROMPT)
    seals = {here.granted(9 + i, PROMPT, namespace=name).shared_seals for i, name in enumerate((ONE, TWO, NAMESPACE))}
    assert len(seals) == 3


def test_nobody_waits_for_the_prefill_of_another_salt() -> None:
    world = World(settings(flight_tokens_min=1), num_blocks=64, block_size=BLOCK)
    world.granted(1, PROMPT, namespace=ONE)

    def asked(number: int, namespace: Namespace) -> object:
        offered = (Candidate(W, 0),)
        return world.do(Acquire(lease_id(number), ALICE, namespace, PROMPT, 17, offered, may_wait=True))

    assert isinstance(asked(2, ONE), Pending)
    for number, namespace in enumerate((TWO, NAMESPACE, named("user 1", BOB)), start=3):
        assert not isinstance(asked(number, namespace), Pending)


def test_quotas_are_those_of_the_domain() -> None:
    world = World(settings(DomainConfig(ALICE, maximum_blocks=6)), num_blocks=64, block_size=BLOCK)
    for number in range(1, 9):
        world.fill(number, tokens(4 * BLOCK, 100 * number), namespace=named(f"user {number}"))
    account = world.core.state.workers[W].quotas.accounts[ALICE]
    assert account.held <= 6
    assert account.evicted_blocks > 0


def test_a_salt_that_never_comes_again_leaves_nothing_behind() -> None:
    """Trees are bounded by blocks and leases, whatever number of salts a client sends."""
    world = World(num_blocks=16, block_size=BLOCK)
    for number in range(1, 200):
        world.fill(number, tokens(2 * BLOCK), namespace=named(f"user {number}"))
    state = world.core.state
    assert 0 < len(state.workers[W].trees) <= 8, "two blocks each"
    for tree in list(state.workers[W].trees):
        world.core.invalidate(now_ns=world.now_ns, domain=tree[0], namespace=tree[1])
    world.tick(10_000, alive=(world.session,))
    assert not state.workers[W].trees
    assert world.core.stats().free_blocks == 16


def test_a_lease_without_blocks_to_find_leaves_no_tree() -> None:
    world = World(num_blocks=16, block_size=BLOCK)
    world.granted(1, tokens(3), namespace=ONE)
    assert len(world.core.state.workers[W].trees) == 1
    world.release(1)
    assert not world.core.state.workers[W].trees


def test_a_lease_id_is_of_one_salt(here: World) -> None:
    grant = here.granted(2, PROMPT, namespace=ONE)
    assert here.acquire(2, PROMPT, namespace=ONE) == grant
    refused = here.acquire(2, PROMPT, namespace=TWO)
    assert "another domain or namespace" in getattr(refused, "message", "")


def test_trees_have_names_that_only_the_key_makes() -> None:
    """What pages, the log and followers are told of a salt."""
    world = World(settings(record_events=True), num_blocks=64, block_size=BLOCK)
    world.fill(1, PROMPT, namespace=ONE)
    world.granted(2, PROMPT, namespace=TWO)
    shown = [tree.namespace for tree in world.core.tree(ALICE, max_depth=9, limit=9).trees]
    assert shown == sorted(with_keyed_salt(KEY, ALICE, name) for name in (ONE, TWO))
    events = world.core.take_events()
    assert {event.namespace for event in events} == {with_keyed_salt(KEY, ALICE, ONE)}
    assert salt_of(ONE) not in repr((shown, events)).encode("latin-1", "replace")


def test_an_operator_can_look_at_one_salt_and_hold_a_prefix_of_it(here: World) -> None:
    (tree,) = here.core.tree(ALICE, max_depth=9, limit=9).trees
    (found,) = here.core.explain(ALICE, tree.namespace, PROMPT)
    assert found.num_cached_tokens == 16
    assert here.core.pin("p", ALICE, tree.namespace, PROMPT, here.now_ns) == 16


def test_who_asks_without_a_namespace_is_told_of_those_without_a_salt(here: World) -> None:
    """There can be as many salts as blocks; the answer does not grow with them."""
    (found,) = here.core.explain(ALICE, None, PROMPT)
    assert (found.namespace, found.num_cached_tokens) == (NAMESPACE, 0)
    here.fill(2, PROMPT)
    (found,) = here.core.explain(ALICE, None, PROMPT)
    assert (found.namespace, found.num_cached_tokens) == (NAMESPACE, 16)


# what is forgotten


@pytest.mark.parametrize("domain", [ALICE, None])
def test_a_namespace_is_forgotten_with_all_its_salts(here: World, domain: DomainId | None) -> None:
    here.fill(2, PROMPT)
    assert here.core.invalidate(now_ns=here.now_ns, domain=domain, namespace=NAMESPACE) == 2
    assert [cached(here, name) for name in (ONE, NAMESPACE)] == [0, 0]
    here.fill(3, PROMPT, namespace=ONE)
    assert cached(here, ONE) == 16, "what is stored afterwards is found"


def test_followers_hear_of_each_salt_that_goes_with_its_namespace() -> None:
    """They compare namespaces, and know nothing of salts."""
    world = World(settings(record_events=True), num_blocks=64, block_size=BLOCK)
    for number, (name, domain) in enumerate(((ONE, ALICE), (TWO, ALICE), (NAMESPACE, ALICE), (named("x", BOB), BOB))):
        world.fill(number + 1, PROMPT, namespace=name, domain=domain)
    world.core.take_events()
    world.core.invalidate(now_ns=world.now_ns, domain=ALICE, namespace=NAMESPACE)
    cleared = {(event.domain, event.namespace) for event in world.core.take_events() if isinstance(event, Cleared)}
    assert cleared == {(ALICE, name) for name in (NAMESPACE, *(with_keyed_salt(KEY, ALICE, n) for n in (ONE, TWO)))}


def test_one_salt_is_forgotten_alone(here: World) -> None:
    here.fill(2, PROMPT)
    here.fill(3, PROMPT, namespace=TWO)
    shown = with_keyed_salt(KEY, ALICE, ONE)
    assert here.core.invalidate(now_ns=here.now_ns, domain=ALICE, namespace=shown) == 1
    assert [cached(here, name) for name in (ONE, TWO, NAMESPACE)] == [0, 16, 16]


def test_another_namespace_keeps_its_salts(here: World) -> None:
    assert here.core.invalidate(now_ns=here.now_ns, namespace=Namespace(b"model-b")) == 0
    assert cached(here, ONE) == 16


def test_a_prefix_is_forgotten_under_each_salt(here: World) -> None:
    here.fill(2, PROMPT)
    here.fill(3, PROMPT, namespace=TWO)
    prefix = tokens(3 * BLOCK)
    assert here.core.invalidate(now_ns=here.now_ns, domain=ALICE, namespace=NAMESPACE, tokens=prefix) == 3
    assert [cached(here, name) for name in (ONE, TWO, NAMESPACE)] == [8, 8, 8]


# restarts


def salted_before() -> Before:
    before = Before()
    before.fill(1, tokens(2 * BLOCK), namespace=ONE)
    before.fill(2, tokens(2 * BLOCK), namespace=TWO)
    before.fill(3, tokens(2 * BLOCK))
    return before


def test_trees_of_salts_regrow() -> None:
    before = salted_before()
    after = After(before).open()
    assert after.check_against_the_worker() == found(before)
    data = tokens(3 * BLOCK)
    assert [cached(after, name, data) for name in (ONE, TWO, NAMESPACE, named("user 3"))] == [8, 8, 8, 0]


@pytest.mark.parametrize("whole", [True, False], ids=["before the crash", "of a prefix, after it"])
def test_what_was_forgotten_with_its_namespace_does_not_regrow(whole: bool) -> None:
    before = salted_before()
    forgotten = {"domain": ALICE, "namespace": NAMESPACE}
    if whole:
        before.core.invalidate(now_ns=before.now_ns, **forgotten)  # type: ignore[arg-type]
    after = After(before)
    if not whole:
        after.core.invalidate(now_ns=after.now_ns, tokens=tokens(2 * BLOCK), **forgotten)  # type: ignore[arg-type]
    after.open()
    assert not found(after)


def test_a_lease_that_comes_back_has_its_salt() -> None:
    before = salted_before()
    before.granted(4, tokens(2 * BLOCK + 1), namespace=ONE)
    claims = tuple(replace(claim, namespace=ONE) for claim in before.claims())
    assert len(claims) == 1
    after = After(before, claims=claims).open()
    (lease,) = after.core.state.sessions[after.session].leases.values()
    assert lease.namespace == with_keyed_salt(KEY, ALICE, ONE)
    assert lease.tree is not None, "its place in the tree of its salt"
    assert lease.tree.namespace == lease.namespace
    assert without_salt(lease.namespace) == NAMESPACE


def test_the_host_tier_gives_back_to_the_salt_that_it_took_from() -> None:
    here = tiers.world()
    here.fill(1, PROMPT, namespace=ONE)
    here.fill(2, tokens(BLOCK, 500))
    here.tick()
    for order in tiers.orders(here):
        tiers.answer(here, order)
    tiers.push_out(here)

    def asked(number: int, namespace: Namespace) -> object:
        offered = (Candidate(W, 0),)
        return here.do(Acquire(lease_id(number), ALICE, namespace, PROMPT, 17, offered, may_wait=True))

    assert not isinstance(asked(3, TWO), Pending)
    here.release(3)
    assert not isinstance(asked(4, NAMESPACE), Pending)
    here.release(4)
    assert isinstance(asked(5, ONE), Pending), "it comes back from the host"
