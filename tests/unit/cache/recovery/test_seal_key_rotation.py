"""Another seal key: what was cached and who runs outlives it, where the key of before is given for one start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coppice.ids import DomainId
from coppice.messages.index import Invalid, Published
from coppice.namespaces import with_salt
from coppice.seals import NO_CHAIN_KEY, ChainKey, chain_key
from coppice_cache.core.base.errors import SettingsRefused
from coppice_cache.core.base.events import Stored
from tests.unit.cache.crash import After, Before, found
from tests.unit.cache.world import ALICE, KEY, NAMESPACE, W, lease_id, settings, tokens

NEW, NEWER = b"another key, 16+", b"a third key, 16+"
ROTATED = settings(record_events=True, seal_key=NEW, previous_seal_keys=(KEY,))


def cached(blocks: int = 4) -> Before:
    before = Before()
    before.fill(1, tokens(4 * blocks))
    return before


def key_of_tree(world: After) -> ChainKey:
    (tree,) = world.core.state.workers[W].trees.values()
    return tree.chain_key


def test_what_was_cached_is_found_and_goes_on_under_its_chain_key() -> None:
    before = cached()
    before.granted(2, tokens(16) + tokens(4, 900), reserve=24)
    after = After(before, config=ROTATED).open()
    assert after.check_against_the_worker() == found(before)
    assert after.settled == {lease_id(2): 4}
    assert isinstance(after.publish(2, 4, tokens(4, 900)), Published)
    after.release(2)
    assert len(found(after)) == 5
    assert key_of_tree(after).secret == chain_key(KEY, ALICE, NAMESPACE).secret


def test_after_one_start_the_key_of_before_is_not_needed() -> None:
    once = After(cached(), config=ROTATED).open()
    once.fill(3, tokens(8, 500))
    again = After(once, config=settings(record_events=True, seal_key=NEW)).open()
    assert again.check_against_the_worker() == found(once)
    assert len(found(again)) == 6
    assert again.granted(4, tokens(20)).num_cached_tokens == 16


def test_keys_may_change_again_and_again() -> None:
    once = After(cached(), config=ROTATED).open()
    twice = After(once, config=settings(record_events=True, seal_key=NEWER, previous_seal_keys=(NEW,))).open()
    assert twice.check_against_the_worker() == found(once)
    assert len(found(twice)) == 4


def test_a_new_tree_is_under_the_new_key() -> None:
    after = After(Before(), config=ROTATED).open()
    after.fill(1, tokens(16))
    assert key_of_tree(after) == chain_key(NEW, ALICE, NAMESPACE)


def test_what_was_published_before_and_never_logged_is_not_published_under_another_key() -> None:
    """Its blocks are sealed under a chain key that nobody has any more; the lease runs on."""
    before = Before()
    before.granted(2, tokens(16), reserve=24)
    before.publish(2, 0, tokens(16))
    after = After(before, [], config=ROTATED).open()
    assert after.settled == {lease_id(2): 0}
    assert isinstance(after.publish(2, 0, tokens(16)), Invalid)
    assert not found(after)
    after.release(2)
    assert after.core.stats().free_blocks == 16


def test_without_the_key_of_before_nobody_is_known() -> None:
    after = After(cached(), config=replace(ROTATED, previous_seal_keys=()), claims=())
    assert after.worker_epoch >> 32 == 2, "its pool counts as new"
    assert not found(after)
    assert after.core.state.unproved_registrations == 1


@pytest.mark.parametrize("shown", [NO_CHAIN_KEY, ChainKey(bytes(32), bytes(16)), chain_key(NEWER, ALICE, NAMESPACE)])
def test_a_chain_key_that_no_seal_key_proves_is_refused(shown: ChainKey) -> None:
    before = cached()
    events = [replace(event, chain_key=shown) for event in before.all_events() if isinstance(event, Stored)]
    after = After(before, events, config=ROTATED).open()
    assert not found(after)
    assert after.core.replay_counts.refused_seal == 4


def test_a_log_that_names_another_domain_finds_nothing_for_it() -> None:
    before = cached()
    events = [replace(event, domain=DomainId("bob")) for event in before.all_events() if isinstance(event, Stored)]
    after = After(before, events, config=ROTATED).open()
    assert not found(after)


def test_a_salt_is_another_name_under_another_key_and_starts_over() -> None:
    before = Before()
    before.fill(1, tokens(16), namespace=with_salt(NAMESPACE, b"s" * 16))
    after = After(before, config=ROTATED).open()
    assert not found(after)
    assert after.core.stats().free_blocks == 16
    assert after.core.replay_counts.refused_seal == 4


@pytest.mark.parametrize("keys", [(b"short",), (KEY, b"k" * 65)])
def test_keys_of_other_lengths_are_refused(keys: tuple[bytes, ...]) -> None:
    with pytest.raises(SettingsRefused, match="16 to 64"):
        settings(previous_seal_keys=keys)
