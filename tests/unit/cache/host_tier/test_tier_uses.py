"""What counts as a use below the device, so that a tier drops what nobody comes back to, and its books stay small."""

from __future__ import annotations

import pytest

from coppice.messages.index import Grant, Pending
from coppice.messages.registration import Direction
from coppice_cache.core.base.settings import Eviction
from coppice_cache.core.eviction.adaptive import AdaptivePolicy
from coppice_cache.core.radix.tree import walk
from tests.unit.cache.host_tier.tier_world import answer, ask, orders, world
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, tokens

EVERY = [Eviction.ADAPTIVE, Eviction.LRU]
FIRST, SECOND, THIRD = (tokens(16, start) for start in (0, 1_000, 2_000))


def copy_down(here: World) -> None:
    """Whatever is demoted at a tick, done."""
    known = len(orders(here))
    here.tick(100, alive=(here.session,))
    for order in orders(here)[known:]:
        answer(here, order)


def on_host(here: World, data: bytes) -> int:
    """Blocks of the prompt that the host tier has."""
    host = here.core.state.workers[W].host
    assert host is not None
    tree = host.store.find_tree(ALICE, NAMESPACE)
    return 0 if tree is None else walk(tree, data, host.store.block_bytes).num_blocks


def last_uses(here: World, data: bytes) -> list[int]:
    """Of the nodes of the host tier that a prompt passes, by their ends; splits leave them as they are."""
    host = here.core.state.workers[W].host
    assert host is not None
    tree = host.store.find_tree(ALICE, NAMESPACE)
    assert tree is not None
    ends = (walk(tree, data[:stop], host.store.block_bytes).node for stop in range(16, len(data) + 1, 16))
    return [node.last_use_ns for node in ends]


def with_two_below(eviction: Eviction) -> World:
    """A host tier of eight blocks is full of the first prompt and then the second; the device has both."""
    here = world(num_blocks=16, host=8, demote_below_share=1.0, eviction=eviction, copy_orders_max=1)
    for number, prompt in enumerate((FIRST, SECOND)):
        here.fill(number, prompt)
        copy_down(here)
    assert [on_host(here, prompt) for prompt in (FIRST, SECOND)] == [4, 4]
    return here


@pytest.mark.parametrize("eviction", EVERY)
def test_what_was_promoted_outlives_what_was_stored_after_it(eviction: Eviction) -> None:
    here = with_two_below(eviction)
    object.__setattr__(here.core.state.settings, "demote_below_share", 0.0)
    for number in range(10, 14):
        here.fill(number, tokens(16, 1_000 * number))
    assert isinstance(ask(here, 20, FIRST + tokens(1, 99)), Pending)
    answer(here, orders(here)[-1])
    assert isinstance(ask(here, 20, FIRST + tokens(1, 99)), Grant)
    here.release(20)
    object.__setattr__(here.core.state.settings, "demote_below_share", 1.0)
    here.tick(100, alive=(here.session,))
    assert orders(here)[-1].direction is Direction.DEMOTE
    assert on_host(here, FIRST) == 4
    assert on_host(here, SECOND) < 4


@pytest.mark.parametrize("eviction", EVERY)
def test_what_is_used_above_again_outlives_what_was_stored_after_it(eviction: Eviction) -> None:
    here = with_two_below(eviction)
    here.fill(10, FIRST)
    copy_down(here)
    here.fill(11, THIRD)
    copy_down(here)
    assert [on_host(here, prompt) for prompt in (FIRST, SECOND, THIRD)] == [4, 0, 4]


def test_what_comes_up_as_a_leaf_and_was_copied_with_what_hung_below_it_is_not_used() -> None:
    here = world(num_blocks=16, host=64, demote_below_share=1.0, eviction=Eviction.LRU)
    here.fill(1, FIRST)
    here.fill(2, FIRST[:32] + SECOND[:32])
    for _ in range(2):
        copy_down(here)
    used = last_uses(here, FIRST)
    object.__setattr__(here.core.state.settings, "demote_below_share", 0.0)
    for number in range(10, 13):
        here.fill(number, tokens(12, 1_000 * number))
    here.fill(13, tokens(20, 13_000))
    left = here.core.match(ALICE, NAMESPACE, FIRST + tokens(1, 99), W).num_cached_tokens
    assert left == 8, "two leaves were evicted, and what they hung at is one now"
    object.__setattr__(here.core.state.settings, "demote_below_share", 1.0)
    copy_down(here)
    assert on_host(here, tokens(12, 10_000)) == 3, "the next victims were looked at"
    assert last_uses(here, FIRST) == used
    here.fill(20, FIRST[:32])
    copy_down(here)
    here.fill(21, FIRST[:32])
    copy_down(here)
    assert last_uses(here, FIRST) != used, "this time it was"


def test_books_of_a_tier_do_not_grow_with_what_passes_through() -> None:
    here = world(num_blocks=8, host=16, demote_below_share=1.0)
    sizes = []
    for number in range(1, 1_501):
        here.fill(number, tokens(16, 100 * number))
        copy_down(here)
        if number % 500 == 0:
            host = here.core.state.workers[W].host
            assert host is not None
            policy = host.store.quotas.accounts[ALICE].eviction
            assert isinstance(policy, AdaptivePolicy)
            sizes.append(sum(map(len, policy._samples._ageing.values())))
    assert len(orders(here)) >= 1_500
    assert 0 < sizes[-1] < sizes[0] + 100
