"""After a restart the trees come back from the log, as far as the worker agrees, and leases find their places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import msgspec
import pytest

from coppice.handles import make_generation, pack_handle
from coppice.ids import BlockId, CacheEpoch, DomainId, WorkerEpoch
from coppice.messages.index import (
    Extended,
    Invalid,
    LeaseClaim,
    NotPublished,
    NotPublishedReason,
    Published,
)
from coppice_cache.core.base.events import Stored
from coppice_cache.core.base.results import Regrown
from coppice_cache.core.base.settings import DomainConfig, Mode
from tests.unit.cache.crash import After, Before, found
from tests.unit.cache.world import ALICE, NAMESPACE, W, World, lease_id, registration, settings, tokens

BOB = DomainId("bob")


def cached(blocks: int = 4) -> Before:
    before = Before()
    before.fill(1, tokens(4 * blocks))
    return before


def test_what_was_cached_is_found_again() -> None:
    before = cached()
    after = After(before)
    assert after.core.is_replaying
    assert not found(after), "not before the worker is open"
    after.open()
    assert after.check_against_the_worker() == found(before)
    assert not after.core.is_replaying
    assert any(isinstance(effect, Regrown) for effect in after.log)
    grant = after.granted(2, tokens(20))
    assert grant.num_cached_tokens == 16
    counts = after.core.replay_counts
    assert (counts.offered, counts.replayed) == (4, 4)


def test_without_a_log_nothing_is_found() -> None:
    after = After(cached(), []).open()
    assert not found(after)
    assert after.core.stats().free_blocks == 16


def test_an_entry_of_another_generation_is_refused_with_all_below_it() -> None:
    before = cached()
    generations, seals = before.arrays()
    generations[1] += 1
    after = After(before, arrays=(generations, seals)).open()
    assert len(after.check_against_the_worker()) == 1
    counts = after.core.replay_counts
    assert (counts.replayed, counts.refused_generation, counts.refused_parent) == (1, 1, 2)
    assert after.granted(2, tokens(20)).num_cached_tokens == 4


def test_an_entry_with_another_seal_is_refused_with_all_below_it() -> None:
    before = cached()
    generations, seals = before.arrays()
    seals[2] = 0
    after = After(before, arrays=(generations, seals)).open()
    assert len(after.check_against_the_worker()) == 2
    counts = after.core.replay_counts
    assert (counts.replayed, counts.refused_seal, counts.refused_parent) == (2, 1, 1)


def test_the_second_look_decides() -> None:
    """Rule 8: a late plan opened a newer occupancy after the worker had registered."""
    before = cached()
    generations, seals = before.arrays()
    later, unsealed = generations.copy(), seals.copy()
    later[2], unsealed[2] = generations[2] + 1, 0
    after = After(before, second=(later, unsealed)).open()
    assert len(after.check_against_the_worker()) == 2


@pytest.mark.parametrize("field", ["tokens", "seals", "handles", "parent_seal", "domain"])
def test_a_record_that_was_made_up_is_refused(field: str) -> None:
    before = cached()
    (event,) = before.all_events()
    assert isinstance(event, Stored)
    worse = {
        "tokens": event.tokens[:-4] + b"\xff\xff\xff\x01",
        "seals": event.seals[:-1] + b"x",
        "handles": event.handles[:-8] + (1 << 63).to_bytes(8, "little"),
        "parent_seal": b"p" * 16,
        "domain": "bob",
    }
    after = After(before, [replace(event, **{field: worse[field]})]).open()  # type: ignore[arg-type]
    left = after.check_against_the_worker()
    assert len(left) == (0 if field in ("parent_seal", "domain") else 3)


def test_events_of_another_worker_epoch_do_not_count() -> None:
    before = cached()
    events = [replace(event, worker_epoch=WorkerEpoch(5)) for event in before.all_events()]
    after = After(before, events).open()
    assert not found(after)
    assert after.core.replay_counts.unclaimed == 4


def test_what_nobody_comes_back_for_is_dropped() -> None:
    world = World(settings(), epoch=2)
    world.core.load_replay({W: cached().all_events()})
    assert world.core.is_replaying
    world.tick(30_000)
    assert not world.core.is_replaying
    assert world.core.replay_counts.unclaimed == 4


def test_a_worker_with_a_new_pool_has_no_use_for_the_log() -> None:
    world = World(settings(), epoch=2)
    world.core.load_replay({W: cached().all_events()})
    world.register(registration())
    assert not world.core.is_replaying
    assert not found(world)


def test_runs_join_whatever_their_order_and_length() -> None:
    before = Before(num_blocks=40)
    before.granted(1, tokens(4), reserve=40)
    for index in range(10):
        before.publish(1, index, tokens(4, 4 * index))
    before.release(1)
    before.fill(2, tokens(20) + tokens(12, 900))
    before.fill(3, tokens(12) + tokens(12, 800))
    events = before.all_events()
    Random(3).shuffle(events)
    after = After(before, events).open()
    assert after.check_against_the_worker() == found(before)
    assert after.core.stats().nodes <= before.core.stats().nodes + 1


# domains


def test_a_domain_that_is_disabled_or_unknown_by_now_is_not_found() -> None:
    before = Before(settings(record_events=True), num_blocks=32)
    before.fill(1, tokens(16))
    before.fill(2, tokens(16), domain=BOB)
    config = settings(DomainConfig(ALICE, Mode.DISABLED), DomainConfig(DomainId("carl")), default_domain=None)
    after = After(before, config=config).open()
    assert not found(after)
    assert after.core.replay_counts.refused_domain == 8
    assert after.core.stats().free_blocks == 32


def test_a_domain_above_its_maximum_of_now_gives_back_the_rest() -> None:
    before = cached(8)
    after = After(before, config=settings(DomainConfig(ALICE, maximum_share=0.25))).open()
    assert len(after.check_against_the_worker()) == 4
    assert after.core.replay_counts.refused_domain == 4


def test_what_was_invalidated_since_the_start_does_not_come_back() -> None:
    forgets: list[Callable[[After], object]] = [
        lambda after: after.core.invalidate(domain=ALICE, now_ns=after.now_ns),
        lambda after: after.core.invalidate(
            domain=ALICE,
            namespace=next(iter(before.core.state.workers[W].trees))[1],
            tokens=tokens(8),
            now_ns=after.now_ns,
        ),
    ]
    for forget in forgets:
        before = cached()
        after = After(before)
        forget(after)
        after.open()
        assert not found(after)


@pytest.mark.parametrize("in_part", [False, True])
def test_what_hung_below_something_distrusted_does_not_come_back_with_the_same_tokens(in_part: bool) -> None:
    """It is reclaimed later than it is cut off; by then what it followed may have been stored again."""
    before = Before(num_blocks=32)
    for number in (1, 2):  # their first two blocks become a node of its own
        before.fill(number, tokens(8) + tokens(12, 900 * number))
    (_, namespace), *_ = before.core.state.workers[W].trees
    before.core.invalidate(domain=ALICE, namespace=namespace, tokens=tokens(8), now_ns=before.now_ns)
    before.fill(3, tokens(8))
    if in_part:
        before.fill(4, tokens(8) + tokens(4, 900))
        before.fill(6, tokens(8) + tokens(4, 900) + tokens(4, 5_000))  # so the old run is taken up in two pieces
    after = After(before).open()
    assert after.check_against_the_worker() == found(before)
    assert after.granted(5, tokens(8) + tokens(16, 900)).num_cached_tokens == (12 if in_part else 8)


def test_an_operators_pin_takes_hold_of_what_regrows() -> None:
    after = After(cached())
    after.core.pin("system", ALICE, NAMESPACE, tokens(12), after.now_ns)
    after.open()
    (view,) = after.core.pins()
    assert view.num_tokens == 12
    assert after.core.stats().workers[0].domains[0].pinned_blocks == 3


# leases


def test_a_lease_on_the_path_is_pinned_there_and_publishes_on() -> None:
    before = cached()
    before.granted(2, tokens(16) + tokens(4, 900), reserve=28)
    before.publish(2, 4, tokens(4, 900))
    after = After(before).open()
    assert after.settled == {lease_id(2): 5}
    assert after.core.stats().pins == 1
    answer = after.publish(2, 5, tokens(4, 950))
    assert isinstance(answer, Published)
    assert answer.num_published_blocks == 6
    assert len(answer.handles) == 8
    after.release(2)
    assert after.granted(3, tokens(16) + tokens(4, 900) + tokens(4, 950) + tokens(4)).num_cached_tokens == 24


def test_what_the_log_lost_is_published_again() -> None:
    before = cached()
    lost = len(before.all_events())
    before.granted(2, tokens(16) + tokens(12, 900), reserve=32)
    before.publish(2, 4, tokens(12, 900))
    after = After(before, before.all_events()[:lost]).open()
    assert after.settled == {lease_id(2): 4}
    assert len(found(after)) == 4
    wrong = after.publish(2, 4, tokens(4, 901))
    assert isinstance(wrong, Invalid), "the worker has the seal of other tokens there"
    assert "before the restart" in wrong.message
    answer = after.publish(2, 4, tokens(12, 900))
    assert isinstance(answer, Published)
    assert answer.num_published_blocks == 7
    assert after.check_against_the_worker() == found(before)


def test_a_lease_with_nothing_in_the_log_publishes_from_its_start() -> None:
    before = Before()
    before.granted(1, tokens(9), reserve=16)
    before.publish(1, 0, tokens(8))
    after = After(before, []).open()
    assert after.settled == {lease_id(1): 0}
    answer = after.publish(1, 0, tokens(8))
    assert isinstance(answer, Published)
    assert answer.num_published_blocks == 2
    assert len(found(after)) == 2


def test_what_others_hold_too_stays_held_and_is_not_published() -> None:
    before = cached()
    for number in (2, 3):
        before.granted(number, tokens(20), reserve=24)
    after = After(before, []).open()
    assert not after.settled
    assert after.publish(2, 0, tokens(4)) == NotPublished(lease_id(2), NotPublishedReason.TREE_GONE)
    assert isinstance(after.extend(2, 28), Extended)
    after.release(2)
    assert after.core.stats().leased_blocks == 6
    after.release(3)
    assert after.core.stats().free_blocks == 16


def test_a_lease_known_in_part_is_pinned_as_far_as_that_goes() -> None:
    before = cached(2)
    first = len(before.all_events())
    before.fill(2, tokens(16))
    for number in (3, 4):
        before.granted(number, tokens(20), reserve=20)
    after = After(before, before.all_events()[:first]).open()
    assert not after.settled
    assert len(found(after)) == 2
    assert after.core.stats().workers[0].domains[0].pinned_blocks == 2
    assert after.publish(3, 2, tokens(4, 8)) == NotPublished(lease_id(3), NotPublishedReason.TREE_GONE)
    after.release(3)
    after.release(4)
    assert after.core.stats().leased_blocks == 0
    assert len(found(after)) == 2


def test_duplicates_stay_with_their_lease() -> None:
    before = Before()
    before.granted(1, tokens(9), reserve=12)
    before.granted(2, tokens(9), reserve=16)
    before.publish(1, 0, tokens(8))
    before.publish(2, 0, tokens(12))
    after = After(before).open()
    assert after.settled == {lease_id(1): 2, lease_id(2): 3}
    assert len(found(after)) == 3
    after.release(2)
    after.release(1)
    assert after.core.stats().free_blocks == 13


def test_a_newer_claim_takes_the_entry_and_all_below_it() -> None:
    """The block was granted again before the crash, which the log did not tell any more."""
    before = cached()
    newer = pack_handle(BlockId(1), make_generation(CacheEpoch(1), 9)).to_bytes(8, "little")
    claim = msgspec.structs.replace(_claim(before), shared=b"", shared_seals=b"", owned=newer)
    after = After(before, claims=(claim,)).open()
    assert len(after.check_against_the_worker()) == 1
    assert after.core.stats().leased_blocks == 1


def _claim(before: Before) -> LeaseClaim:
    before.granted(7, tokens(20))
    (claim,) = before.claims()
    before.release(7)
    return claim


def test_a_lease_that_contradicts_the_log_wins() -> None:
    """It holds block 1 as the second of another sequence: whatever the log says, nobody shall find it."""
    before = cached()
    grant = before.granted(2, tokens(20))
    claim = msgspec.structs.replace(
        before.claims()[0], shared=grant.shared[8:16], shared_seals=grant.shared_seals[16:32], owned=b""
    )
    before.release(2)
    after = After(before, claims=(claim,)).open()
    assert len(found(after)) == 1
    assert after.core.stats().leased_blocks == 1
    after.release(2)
    assert after.core.stats().free_blocks == 15


def test_drain_pins_survive() -> None:
    """A session that ended in the window: its pin holds until its own fence is acknowledged."""
    before = cached()
    before.granted(2, tokens(20))
    after = After(before)
    after.core.end_client(before.session, after.now_ns)
    after.collect()
    generations, seals = after.second
    window, ended = after.fences()[0], after.fences()[1]
    after.ack(window, generations=generations.tobytes(), seals=seals.tobytes())
    assert after.core.stats().workers[0].domains[0].pinned_blocks == 4
    after.ack(ended)
    assert after.core.stats().pins == 0
    assert len(found(after)) == 4
    assert after.core.stats().free_blocks == 12
