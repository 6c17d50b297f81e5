"""What peers claim to have been told counts with a voucher for just that; everybody else begins anew (rule 9)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from coppice.handles import CACHE_EPOCH_MAX, ERA_EPOCHS, epoch_in_era, epoch_of, era_of, generation_of, make_generation
from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import Workers
from coppice.messages.registration import Register
from coppice.session.frames import Hello
from coppice.session.vouchers import Vouchers, scheduler_voucher
from coppice_cache.core.base.results import Reincarnate
from coppice_cache.core.index import IndexCore
from tests.unit.cache.restart import OLD_WORKER, S1, Pool, Restarted
from tests.unit.cache.world import KEY, V, W, World, registration, settings, tokens

FORGED = WorkerEpoch(65_534 << 32 | 1)


def granted_by(epoch: int) -> bytes:
    return make_generation(CacheEpoch(epoch), 9).to_bytes(8, "little")


def told(message: Register) -> Register:
    """The same without a voucher."""
    return replace(message, voucher=b"")


FORGERIES = {
    "a high epoch": told(registration(V, num_blocks=1, epoch=FORGED, highest=65_534)),
    "the highest of all": told(registration(V, num_blocks=1, epoch=(1 << 64) - 1, highest=CACHE_EPOCH_MAX)),
    "a high epoch without a worker epoch": registration(V, num_blocks=1, highest=65_534),
    "a high generation": registration(V, num_blocks=1, generations=granted_by(65_534)),
    "a voucher that is cut": replace(
        registration(V, num_blocks=1, epoch=FORGED, highest=9),
        voucher=registration(V, epoch=FORGED, highest=9).voucher[:-1],
    ),
    "a voucher of another worker": replace(
        registration(V, num_blocks=1, epoch=FORGED, highest=9), voucher=registration(W, epoch=FORGED, highest=9).voucher
    ),
    "a voucher for another cache epoch": replace(
        registration(V, num_blocks=1, epoch=OLD_WORKER, highest=9),
        voucher=registration(V, epoch=OLD_WORKER, highest=1).voucher,
    ),
    "a voucher for another worker epoch": replace(
        registration(V, num_blocks=1, epoch=FORGED, highest=1),
        voucher=registration(V, epoch=OLD_WORKER, highest=1).voucher,
    ),
    "a generation above what is vouched for": registration(
        V, num_blocks=1, epoch=OLD_WORKER, highest=1, generations=granted_by(4)
    ),
}


@pytest.mark.parametrize("message", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_registration_is_that_of_a_new_pool(message: Register) -> None:
    world = World(epoch=2, num_blocks=8)
    answer = world.register(message)
    assert not [effect for effect in world.log if isinstance(effect, Reincarnate)]
    assert (answer.cache_epoch, answer.worker_epoch >> 32) == (2, 2)
    worker = world.core.state.workers[V]
    assert worker.is_open
    assert not worker.ledger.generations.any()
    assert not worker.window.named
    grant = world.granted(1, tokens(4))
    assert epoch_of(generation_of(int.from_bytes(grant.owned[:8], "little"))) == 2


def test_what_was_told_is_believed() -> None:
    world = Restarted(Pool(), S1)
    assert world.core.state.workers[W].epoch == OLD_WORKER
    assert world.core.state.unproved_registrations == 0


def test_what_another_seal_key_vouched_for_is_nothing() -> None:
    world = World(settings(), epoch=2)
    voucher = Vouchers(b"another key, 16+").of_registration(0, W, WorkerEpoch(OLD_WORKER), CacheEpoch(1))
    answer = world.register(replace(Pool().report(S1), voucher=voucher))
    assert answer.worker_epoch != OLD_WORKER
    assert world.core.state.unproved_registrations == 1


# sessions


def hello(core: IndexCore, **changes: object) -> Hello:
    """Of a client that was attached to incarnation (4, 5) as session (4, 6)."""
    key, incarnation, epoch = b"k" * 16, 4 << 32 | 5, 4 << 32 | 6
    voucher = Vouchers(KEY).of_session(key, incarnation, epoch)
    true = Hello(key, 1, incarnation, 0, epoch, "peer", voucher=voucher)
    return replace(true, **changes)  # type: ignore[arg-type]


def test_a_session_is_believed_with_all_that_the_voucher_is_for() -> None:
    core = World(epoch=2).core
    assert core.believed(hello(core)) == (4, 4 << 32 | 6)
    for changes in (
        {"key": b"l" * 16},
        {"incarnation": 65_534 << 32},
        {"epoch": 4 << 32 | 7},
        {"voucher": b""},
        {"voucher": bytes(16)},
    ):
        assert core.believed(hello(core, **changes)) == (0, 0), changes


def test_each_scheduler_is_told_a_voucher_for_each_worker() -> None:
    world = World(num_blocks=8)
    first, second = world.session, world.attach()
    keys = {
        W: world.register(registration(num_blocks=8)).scheduler_key,
        V: world.register(registration(V)).scheduler_key,
    }
    assert len(set(keys.values())) == 2
    for epoch in (first, second):
        heard = [message for message in world.told(epoch) if isinstance(message, Workers)][-1]
        assert {w.worker_id: w.voucher for w in heard.workers} == {w: scheduler_voucher(keys[w], epoch) for w in keys}
    assert all(not worker.voucher for worker in world.core.state.workers_message().workers)


def test_a_client_that_plans_nothing_is_told_no_voucher() -> None:
    world = World(num_blocks=8)
    epoch = world.core.attach_client(SchedulerEpoch(0), world.now_ns, plans=False)
    world.register(registration(V))
    heard = [message for message in world.told(epoch) if isinstance(message, Workers)]
    assert heard
    assert not any(worker.voucher for message in heard for worker in message.workers)


# eras


@given(st.integers(1, CACHE_EPOCH_MAX - 1))
def test_generations_rise_within_an_era_and_only_there(epoch: int) -> None:
    before, after = CacheEpoch(epoch), CacheEpoch(epoch + 1)
    rise = make_generation(after, 0) > make_generation(before, (1 << 24) - 1)
    assert rise == (era_of(before) == era_of(after))
    assert make_generation(before, 0) > 0
    assert epoch_of(make_generation(before, 0)) == epoch_in_era(before)


def test_a_pool_of_an_earlier_era_begins_again() -> None:
    last = ERA_EPOCHS
    world = World(settings(), epoch=last + 1)
    old = registration(num_blocks=1, epoch=last << 32 | 1, highest=last, generations=granted_by(last))
    answer = world.register(old)
    assert answer.worker_epoch >> 32 == last + 1
    world.session = world.attach()
    grant = world.granted(1, tokens(4))
    assert int.from_bytes(grant.owned, "little") >> 24 == make_generation(CacheEpoch(last + 1), 1)


def test_a_pool_of_the_same_era_goes_on() -> None:
    world = World(settings(), epoch=ERA_EPOCHS)
    epoch = (ERA_EPOCHS - 1) << 32 | 1
    old = registration(num_blocks=1, epoch=epoch, highest=ERA_EPOCHS - 1, generations=granted_by(ERA_EPOCHS - 1))
    assert world.register(old).worker_epoch == epoch


# bounds


def test_ids_that_were_ever_seen_have_a_bound() -> None:
    world = World(settings(known_workers_max=20, workers_max=4), epoch=2)
    for number in range(100):
        worker_id = WorkerId(f"w{number}")
        world.register(registration(worker_id))
        world.core.end_worker(worker_id, world.now_ns)
        assert len(world.core.state.known_workers) <= 20
    world.register(Pool().report(S1))
    assert world.core.state.workers[W].epoch != OLD_WORKER, "nobody knows any more whether somebody heard of its end"


def test_sessions_that_ended_have_a_bound() -> None:
    world = World(settings(sessions_max=4), epoch=2)
    kept = 0
    for number in range(1, 100):
        claimed = SchedulerEpoch(1 << 32 | number)
        epoch = world.attach(claimed)
        kept += epoch == claimed
        world.core.end_client(epoch, world.now_ns)
        assert len(world.core.state.dead_epochs) <= 8
    assert kept == 8
