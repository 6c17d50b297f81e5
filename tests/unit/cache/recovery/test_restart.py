"""After a restart of the cache: the closed ledger, its window, the second look (design, section 6a)."""

from __future__ import annotations

from struct import unpack

import pytest

from coppice.handles import make_generation
from coppice.ids import CacheEpoch
from coppice.messages.index import (
    Abandon,
    Extended,
    Grant,
    NoCapacity,
    NoCapacityReason,
    NotPublished,
    NotPublishedReason,
    Publish,
    Reattach,
    Reattached,
    Release,
)
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.results import SessionEnded
from coppice_cache.core.base.settings import DomainConfig
from tests.unit.cache.restart import (
    BLOCKS,
    OLD_WORKER,
    S1,
    S2,
    SEAL,
    Pool,
    Restarted,
    claim,
    generation,
    handle,
    ids,
)
from tests.unit.cache.world import ALICE, W, World, lease_id, registration, settings, tokens

# rule 3: the closed ledger and its window


def test_every_block_drains_until_the_windows_fence_is_acknowledged() -> None:
    world = Restarted(Pool(), S1, attach=(S1,))
    assert world.core.stats().draining_blocks == BLOCKS
    answer = world.acquire(1, tokens(4), session=S1)
    assert isinstance(answer, NoCapacity)
    assert answer.reason is NoCapacityReason.NO_WORKER
    assert not world.fences()
    world.claims(S1)
    assert world.core.stats().draining_blocks == BLOCKS
    fence = world.open()
    assert (fence.up_to_epoch, fence.spared, fence.scheduler_epochs) == ((2 << 32) - 1, (S1,), ())
    assert world.core.stats().free_blocks == BLOCKS
    grant = world.granted(1, tokens(4), session=S1)
    assert grant.worker_epoch == OLD_WORKER
    assert unpack("<Q", grant.owned)[0] >> 24 == make_generation(CacheEpoch(2), 1)


def test_the_window_waits_for_all_named_sessions() -> None:
    world = Restarted(Pool(), S1, S2, attach=(S1,))
    world.claims(S1)
    assert not world.fences()
    world.attach(S2)
    assert not world.fences()
    world.claims(S2)
    assert set(world.open().spared) == {S1, S2}
    assert world.is_open


def test_the_window_closes_at_the_session_ttl() -> None:
    world = Restarted(Pool(), S1, S2, attach=(S1,))
    world.claims(S1)
    world.tick(9_900, alive=(S1,))
    assert not world.fences()
    world.tick(200, alive=(S1,))
    fence = world.open()
    assert (fence.scheduler_epochs, fence.spared) == ((S2,), (S1,))


def test_fenced_sessions_never_reattach() -> None:
    world = Restarted(Pool(), S1, attach=(S1,))
    world.claims(S1)
    assert world.fences()
    assert world.attach(S2) != S2


def test_who_attached_without_claims_by_the_deadline_is_over() -> None:
    world = Restarted(Pool(), S1, S2, attach=(S1, S2))
    world.claims(S1)
    world.tick(10_100, alive=(S1, S2))
    assert SessionEnded(S2) in world.log
    assert world.fences()[-1].spared == (S1,)
    assert world.attach(S2) != S2


def test_an_epoch_that_expired_here_does_not_come_back() -> None:
    world = Restarted(Pool(), S1, S2, attach=(S1, S2))
    world.core.end_client(S2, world.now_ns)
    world.collect()
    assert world.attach(S2) != S2
    world.claims(S1)
    assert world.fences()[-1].scheduler_epochs == (S2,)


def test_after_the_deadline_nobody_claims_an_old_epoch() -> None:
    world = World(epoch=2)
    world.tick(10_100)
    assert world.attach(S1) != S1


def test_a_pause_of_ours_prolongs_the_window() -> None:
    world = Restarted(Pool(), S1)
    world.now_ns += 60_000 * 1_000_000
    world.core.tick(world.now_ns)
    world.collect()
    assert not world.fences()
    assert world.attach(S1) == S1


def test_a_window_that_names_nobody_waits_for_the_first_session_of_before() -> None:
    """Its fence ends the time of re-attachment, also for who has leases on other workers."""
    world = Restarted(Pool())
    assert not world.fences()
    assert world.attach(S1) == S1
    assert not world.fences()
    world.claims(S1)
    assert world.fences()[-1].spared == (S1,)


def test_a_window_that_names_nobody_closes_when_nobody_comes() -> None:
    world = Restarted(Pool())
    world.tick(world.core.state.settings.session_ttl_ms)
    assert world.fences()[-1].spared == ()
    assert not world.is_open
    world.open()
    assert world.is_open


def test_a_pool_that_survived_unused_is_fenced_too() -> None:
    """Whoever was granted something there before may not have planned with it yet."""
    world = World(epoch=2)
    world.register(registration(epoch=OLD_WORKER, highest=1))
    assert not world.core.stats().workers[0].open
    world.tick(world.core.state.settings.session_ttl_ms)
    (fence,) = world.fences()
    assert fence.report
    world.ack(fence, generations=bytes(8 * 16), seals=bytes(16 * 16))
    assert world.core.stats().workers[0].open


def test_a_new_pool_opens_at_once() -> None:
    world = World(epoch=2)
    world.register(registration(epoch=0))
    assert world.core.stats().workers[0].open
    assert not world.fences()


def test_a_window_ack_without_arrays_is_refused() -> None:
    world = Restarted(Pool(), S1, attach=(S1,))
    world.claims(S1)
    with pytest.raises(MessageRefused, match="need"):
        world.ack(world.fences()[-1])
    assert not world.is_open


def test_a_reconnect_during_the_window_keeps_it() -> None:
    world = Restarted(Pool(), S1, attach=(S1,))
    world.claims(S1, claim(1, owned=handle(0, 5)))
    sent = len(world.fences())
    assert world.register(world.pool.report(S1, highest=2)).worker_epoch == OLD_WORKER
    assert world.fences()[sent:] == world.fences()[:sent] != []
    world.open()
    assert world.core.stats().leased_blocks == 1


# rules 6 to 8


def test_reattached_leases_extend_and_release_and_publish_only_what_nobody_else_holds() -> None:
    world = Restarted(Pool().seal(0), S1, attach=(S1,))
    world.session = S1
    world.claims(S1, claim(1, shared=handle(0, 5), owned=handle(1, 5)), claim(2, shared=handle(0, 5)))
    closed = world.extend(1, 16)
    assert isinstance(closed, NoCapacity)
    assert closed.reason is NoCapacityReason.NO_WORKER
    world.open()
    answer = world.extend(1, 16)
    assert isinstance(answer, Extended)
    assert (answer.first_block, len(answer.owned)) == (2, 16)
    gone = world.do(Publish(lease_id(1), 1, tokens(4)))
    assert gone == NotPublished(lease_id(1), NotPublishedReason.TREE_GONE)
    again = world.acquire(1, tokens(8))
    assert isinstance(again, Grant)
    assert (again.shared, again.owned, again.num_cached_tokens) == (handle(0, 5), handle(1, 5), 4)
    world.release(1)
    world.release(2)
    assert world.core.stats().free_blocks == BLOCKS


def test_held_blocks_are_found_by_nobody_and_free_after_the_last_holder() -> None:
    world = Restarted(Pool().seal(0), S1, attach=(S1,))
    world.session = S1
    world.claims(S1, claim(1, shared=handle(0, 5)), claim(2, shared=handle(0, 5)))
    world.open()
    assert world.granted(3, tokens(9)).num_cached_tokens == 0
    world.release(1)
    assert world.core.stats().leased_blocks == 4
    world.release(2)
    assert world.core.stats().leased_blocks == 3


def test_a_held_block_drains_only_when_no_live_holder_is_left() -> None:
    world = Restarted(Pool().seal(0), S1, S2, attach=(S1, S2))
    world.claims(S1, claim(1, shared=handle(0, 5)))
    world.claims(S2, claim(2, shared=handle(0, 5)))
    world.open()
    world.core.end_client(S2, world.now_ns)
    world.collect()
    expiry = world.fences()[-1]
    assert (world.core.stats().leased_blocks, world.core.stats().draining_blocks) == (1, 0)
    world.do(Release(lease_id(1)), S1)
    assert (world.core.stats().leased_blocks, world.core.stats().draining_blocks) == (0, 1)
    world.ack(expiry)
    assert world.core.stats().free_blocks == BLOCKS


def test_what_is_released_in_the_window_is_free_only_after_it() -> None:
    world = Restarted(Pool(), S1, S2, attach=(S1,))
    world.claims(S1, claim(1, owned=handle(0, 5)), claim(2, owned=handle(1, 5)))
    world.do(Release(lease_id(1)), S1)
    world.do(Abandon(lease_id(2)), S1)
    assert world.core.stats().draining_blocks == BLOCKS
    abandoned = world.fences()[-1]
    assert abandoned.lease_ids == (lease_id(2),)
    world.tick(10_100, alive=(S1,))
    world.open()
    assert world.core.stats().draining_blocks == 1
    world.ack(abandoned)
    assert world.core.stats().free_blocks == BLOCKS


def test_an_ack_before_the_opening_frees_nothing() -> None:
    world = Restarted(Pool(), S1, S2, attach=(S1,))
    world.claims(S1, claim(2, owned=handle(1, 5)))
    world.do(Abandon(lease_id(2)), S1)
    world.ack(world.fences()[-1])
    assert world.core.stats().draining_blocks == BLOCKS


def test_the_second_look_takes_what_is_someone_elses_by_now() -> None:
    pool = Pool().seal(0).seal(1)
    world = Restarted(pool, S1, attach=(S1,))
    world.claims(S1, claim(1, shared=handle(0, 5)), claim(2, shared=handle(1, 5)), claim(3, owned=handle(2, 5)))
    pool.generations[0] = pool.generations[3] = generation(9)
    pool.seals[1] = b"other seal......"
    world.open()
    lost = {i for m in world.told(S1) if isinstance(m, Reattached) for i in m.refused}
    assert lost == ids(1, 2)
    fence = world.fences()[-1]
    assert set(fence.lease_ids) == lost
    assert world.core.stats().draining_blocks == 2
    world.ack(fence)
    assert (world.core.stats().free_blocks, world.core.stats().leased_blocks) == (BLOCKS - 1, 1)
    assert world.core.state.workers[W].ledger.generation[3] == generation(9)


def test_an_owned_block_that_was_attached_late_stays() -> None:
    pool = Pool()
    world = Restarted(pool, S1, attach=(S1,))
    world.claims(S1, claim(1, owned=handle(0, 6)))
    pool.generations[0] = generation(6)
    pool.seals[0] = SEAL
    world.open()
    assert world.core.stats().leased_blocks == 1
    assert isinstance(world.extend(1, 8), Extended)


def test_a_second_restart_works_like_the_first() -> None:
    pool = Pool()
    world = Restarted(pool, S1, attach=(S1,))
    world.claims(S1, claim(1, owned=handle(0, 5)))
    world.open()
    grant = world.granted(2, tokens(4), session=S1)
    later = World(epoch=3)
    later.register(pool.report(S1, highest=2))
    later.attach(S1)
    moved = claim(2, owned=grant.owned)
    later.core.receive_client(S1, Reattach((claim(1, owned=handle(0, 5)), moved)), later.now_ns)
    later.collect()
    assert Reattached(CacheEpoch(3), (lease_id(1), lease_id(2)), ()) in later.told(S1)


def test_a_maximum_that_was_lowered_meanwhile_revokes_nothing() -> None:
    world = World(settings(DomainConfig(ALICE, maximum_share=0.25)), epoch=2)
    world.register(Pool().report(S1))
    world.attach(S1)
    world.session = S1
    owned = b"".join(handle(block, 5) for block in range(4))
    world.core.receive_client(S1, Reattach((claim(1, owned=owned),)), world.now_ns)
    world.collect()
    world.ack(world.fences()[-1], **Pool().arrays())
    assert world.core.stats().leased_blocks == 4
    assert isinstance(world.extend(1, 20), NoCapacity)
    world.release(1)
    assert isinstance(world.acquire(2, tokens(8)), Grant)


def test_a_claim_does_not_say_whether_its_holder_has_zeroed_the_block() -> None:
    """The holder may never have told the worker: its handle is newer than what the worker has."""
    world = Restarted(Pool(), S1, attach=(S1,), default_domain=DomainConfig(ALICE, zero_on_change=True))
    accepted, _ = world.claims(S1, claim(1, owned=handle(3, 6)))
    assert accepted == ids(1)
    world.open()
    world.do(Release(lease_id(1)))
    grant = world.granted(2, tokens(4 * BLOCKS), session=S1)
    assert handle(3, 1, epoch=2) in [grant.zero[at : at + 8] for at in range(0, len(grant.zero), 8)]
