"""Epochs after restarts: each names one session or one registration, and what was declared dead stays dead."""

from __future__ import annotations

import pytest

from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import DEAD_EPOCHS_MAX, DeadWorker, Reattach
from coppice_cache.core.base.results import SessionEnded, WorkerEnded
from coppice_cache.core.index import IndexCore
from coppice_cache.core.state.sessions import FIRST_EPOCHS
from tests.unit.cache.restart import OLD_WORKER, S1, S2, Pool, Restarted, claim, handle, ids
from tests.unit.cache.world import W, World, registration, settings

DEAD = DeadWorker(W, WorkerEpoch(OLD_WORKER))


def reattach(world: World, epoch: SchedulerEpoch, *dead: DeadWorker) -> None:
    world.core.receive_client(epoch, Reattach((), dead), world.now_ns)
    world.collect()


def test_incarnations_that_took_the_same_cache_epoch_mint_different_epochs() -> None:
    """The counter of cache epochs was lost between them. A fence that spares one session must not spare another."""
    minted = set()
    for first in (0, 5_000, FIRST_EPOCHS - 1):
        core = IndexCore(settings(), CacheEpoch(1), 0, first)
        minted |= {core.attach_client(SchedulerEpoch(0), 0) for _ in range(3)}
        core.receive_worker(W, registration(num_blocks=4), 0)
        minted |= {core.state.workers[W].epoch}
    assert len(minted) == 9, "worker epochs count from the same number as those of sessions"
    assert all(epoch >> 32 == 1 for epoch in minted)


def test_a_worker_epoch_that_a_session_was_told_is_over_stays_over() -> None:
    """The session claims nothing there and is spared by the window's fence, while what it ran may run on."""
    world = World(settings(), epoch=2)
    assert world.attach(S1) == S1
    reattach(world, S1, DEAD)
    registered = world.register(Pool().report(S1))
    assert registered.worker_epoch != OLD_WORKER
    assert world.core.stats().workers[0].open


def test_the_word_may_come_after_the_worker() -> None:
    world = Restarted(Pool(), S1, S2, attach=(S1, S2))
    reattach(world, S1, DEAD)
    assert WorkerEnded(W, WorkerEpoch(OLD_WORKER)) in world.log
    assert world.core.stats().workers == ()
    assert world.register(Pool().report(S1)).worker_epoch != OLD_WORKER


def test_a_claim_on_an_epoch_that_another_session_saw_end_is_refused() -> None:
    world = World(settings(), epoch=2)
    for epoch in (S1, S2):
        assert world.attach(epoch) == epoch
    reattach(world, S1, DEAD)
    world.core.receive_client(S2, Reattach((claim(1, owned=handle(0, 5)),)), world.now_ns)
    world.register(Pool().report(S1, S2))
    refused = {i for message in world.told(S2) for i in getattr(message, "refused", ())}
    assert refused == ids(1)


def test_a_session_that_is_over_takes_its_word_along() -> None:
    """Its epoch is fenced, so nothing of it can run there."""
    world = World(settings(), epoch=2)
    world.attach(S1)
    reattach(world, S1, DEAD)
    world.core.end_client(S1, world.now_ns)
    assert world.register(Pool().report(S1)).worker_epoch == OLD_WORKER


def test_our_own_word_on_an_epoch_of_ours_stands() -> None:
    world = World(num_blocks=8)
    epoch = world.core.state.workers[W].epoch
    reattach(world, world.session, DeadWorker(W, epoch), DeadWorker(WorkerId("x"), WorkerEpoch(1)))
    assert world.core.state.workers[W].epoch == epoch


def test_a_session_minted_here_was_told_nothing_by_others() -> None:
    world = Restarted(Pool(), S1, attach=(S1,))
    world.claims(S1)
    world.open()
    stranger = world.attach()
    reattach(world, stranger, DEAD)
    assert world.is_open


@pytest.mark.parametrize("what", ["claims", "dead workers"])
def test_a_session_that_claims_more_than_it_may_is_over(what: str) -> None:
    """Refused, it would come again with the same for ever; under another epoch it starts anew."""
    world = World(settings(workers_max=2, leases_per_session_max=4), epoch=2)
    assert world.attach(S1) == S1
    dead = tuple(DeadWorker(W, WorkerEpoch(number)) for number in range(2 * DEAD_EPOCHS_MAX + 1))
    claims = tuple(claim(number) for number in range(5))
    message = Reattach(claims, ()) if what == "claims" else Reattach((), dead)
    world.core.receive_client(S1, message, world.now_ns)
    world.collect()
    assert SessionEnded(S1) in world.log
    assert world.attach(S1) != S1
