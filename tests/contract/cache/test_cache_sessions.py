"""Sessions with the cache service over streams: ops, reconciliation, expiry, restarts with re-attachment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from coppice.handles import epoch_of, generations
from coppice.ids import CacheEpoch, Generation, LeaseId, SchedulerEpoch
from coppice.messages.index import (
    Extend,
    Extended,
    Gone,
    Grant,
    Invalid,
    LeaseClaim,
    LeaseSet,
    OpBatch,
    Publish,
    Published,
    Reattach,
    Release,
    Released,
    lease_hash,
)
from coppice.session.frames import Hello, Reject, RejectCode
from coppice_rpc.v1 import cache_pb2 as pb
from tests.fakes.cache.cache_ends import CALL_S, Cache, FakeWorker, StreamClient, UnaryClient, claim, lease, prompt
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]


@pytest.fixture
def cache(keep: Keep) -> Cache:
    started = keep(Cache())
    assert isinstance(started, Cache)
    return started


def granted(client: StreamClient, number: int, length: int, domain: str = "a") -> Grant:
    (grant,) = client.ask(client.acquire(number, prompt(length), domain))
    assert isinstance(grant, Grant), grant
    return grant


def test_a_batch_is_answered_in_its_order(cache: Cache, keep: Keep) -> None:
    keep(FakeWorker(cache)).wait_registered()
    client = keep(StreamClient(cache))
    wait_for(lambda: client.workers, "the list of workers, unasked")
    assert client.workers[-1].workers[0].worker_id == "w"
    text = prompt(9)
    answers = client.ask(
        client.acquire(1, text),
        Publish(lease(1), 0, text[: 8 * 4]),
        client.acquire(2, text),
        Extend(lease(2), 16),
        Extend(lease(9), 16),
        client.acquire(3, b""),
        Release(lease(9)),
    )
    kinds = [type(answer) for answer in answers]
    assert kinds == [Grant, Published, Grant, Extended, Gone, Invalid, Released]
    assert answers[2].num_cached_tokens == 8
    assert client.batches[-1].cache_epoch == cache.process._service.cache_epoch
    cache.audit()


def test_workers_that_come_and_go_are_told(cache: Cache, keep: Keep) -> None:
    client = keep(StreamClient(cache))
    worker = keep(FakeWorker(cache)).wait_registered()
    wait_for(lambda: client.workers and client.workers[-1].workers, "the new worker")
    assert client.workers[-1].workers[0].worker_epoch == worker.epoch


def test_the_heartbeat_carries_a_digest_of_the_leases(cache: Cache, keep: Keep) -> None:
    keep(FakeWorker(cache)).wait_registered()
    client = keep(StreamClient(cache))
    granted(client, 1, 9)
    granted(client, 2, 9)
    wanted = lease_hash(lease(1)) ^ lease_hash(lease(2))
    wait_for(lambda: client.digests and client.digests[-1].count == 2, "a digest of two leases")
    assert client.digests[-1].digest == wanted


def test_leases_that_one_side_does_not_know_die(cache: Cache, keep: Keep) -> None:
    worker = keep(FakeWorker(cache)).wait_registered()
    client = keep(StreamClient(cache))
    granted(client, 1, 9)
    granted(client, 2, 9)
    client.post(LeaseSet((lease(2), lease(3))))
    assert worker.wait_fence().lease_ids == (lease(1),)
    wait_for(lambda: client.reattached, "the unknown one is named")
    assert client.reattached[0].refused == (lease(3),)
    assert client.ask(Extend(lease(1), 20), Extend(lease(2), 12)) == (Gone(lease(1)), client.batches[-1].answers[1])
    wait_for(lambda: cache.stats()["draining_blocks"] == 0, "the fence frees the blocks")
    assert cache.stats()["leases"] == 1
    cache.audit()


def test_an_oversized_batch_is_refused_whole_and_the_leases_live(cache: Cache, keep: Keep) -> None:
    keep(FakeWorker(cache)).wait_registered()
    client = keep(StreamClient(cache))
    granted(client, 1, 9)
    epoch, before = client.epoch, cache.stats()
    client.post(OpBatch(tuple(Release(lease(1)) for _ in range(4_097))))
    wait_for(lambda: len(client.attached) == 2, "the session starts over")
    assert "4097 ops" in client.rejected[0].message
    assert client.rejected[0].code is RejectCode.INVALID
    assert (client.attached[1].fresh, client.epoch) == (True, epoch)
    assert cache.stats() == before
    client.post(LeaseSet((lease(1),)))
    answer = client.ask(Extend(lease(1), 20))[0]
    assert isinstance(answer, Extended)
    assert not client.reattached


def test_a_session_survives_its_connections(cache: Cache, keep: Keep) -> None:
    worker = keep(FakeWorker(cache)).wait_registered()
    client = keep(StreamClient(cache))
    granted(client, 1, 9)
    for number in range(2, 5):
        client.link._wire.abort()
        granted(client, number, 2)
    wait_for(lambda: len(client.attached) >= 2, "a reconnect")
    assert [attached.fresh for attached in client.attached[1:]] == [False] * (len(client.attached) - 1)
    assert cache.stats()["leases"] == 4
    assert not worker.fences
    cache.audit()


def test_an_expired_session_comes_back_with_another_epoch(keep: Keep) -> None:
    cache = keep(Cache(session_ttl_ms=1_500))  # its client says something each second
    worker = keep(FakeWorker(cache)).wait_registered()
    client = keep(StreamClient(cache))
    old = client.epoch
    granted(client, 1, 9)
    # The client falls silent without closing anything: its heartbeats stop, as those of a paused process do.
    with client.link._lock:
        assert worker.wait_fence().scheduler_epochs == (old,)
        wait_for(lambda: cache.stats()["free_blocks"] == 16, "its blocks are free")
    wait_for(lambda: len(client.attached) == 2, "it attaches again")
    assert client.attached[1].fresh
    assert client.epoch > old
    assert client.ask(Extend(lease(1), 20)) == (Gone(lease(1)),)
    assert cache.stats()["sessions"] == 1


def test_an_epoch_that_somebody_holds_is_not_shared(cache: Cache, keep: Keep) -> None:
    first = keep(StreamClient(cache))
    second = keep(StreamClient(cache, epoch=first.epoch))
    unary = keep(UnaryClient(cache))
    third = keep(StreamClient(cache, epoch=unary.epoch))
    assert len({first.epoch, second.epoch, unary.epoch, third.epoch}) == 4


def test_the_unary_forms_do_not_reach_a_streams_session(cache: Cache, keep: Keep) -> None:
    keep(FakeWorker(cache)).wait_registered()
    stream, unary = keep(StreamClient(cache)), keep(UnaryClient(cache))
    granted(stream, 1, 9)
    unary.epoch = stream.epoch
    assert not unary.renew()
    with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
        unary.acquire(2, prompt(9))
    assert unary.release(1).WhichOneof("answer") == "released"
    assert unary.extend(1, 20).WhichOneof("answer") == "gone"
    unary.stub.CloseSession(pb.CloseSessionRequest(session_epoch=stream.epoch), timeout=CALL_S)
    assert cache.stats()["leases"] == 1
    assert isinstance(stream.ask(Extend(lease(1), 12))[0], Extended)


def test_a_unary_session_is_reached_by_whoever_opened_it_alone(cache: Cache, keep: Keep) -> None:
    """Epochs are counted, so they name no session here; nor does what comes close to another's name."""
    keep(FakeWorker(cache)).wait_registered()
    victim, stranger = keep(UnaryClient(cache)), keep(UnaryClient(cache))
    victim.acquire(1, prompt(9))
    epochs = [*cache.process._service.clients._by_epoch, victim.epoch + 1, victim.epoch - 1, 0]
    for guessed in epochs:
        stranger.epoch = guessed
        assert not stranger.renew()
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            stranger.acquire(2, prompt(9))
        assert stranger.release(1).WhichOneof("answer") == "released"
        stranger.stub.CloseSession(pb.CloseSessionRequest(session_epoch=guessed), timeout=CALL_S)
    assert cache.stats()["leases"] == 1
    assert victim.renew()


def test_what_a_replaced_worker_still_says_is_ignored(cache: Cache, keep: Keep) -> None:
    worker = keep(FakeWorker(cache)).wait_registered()
    workers = cache.process._service.workers
    old = workers._by_id[worker.worker_id].link
    newer = keep(FakeWorker(cache)).wait_registered()
    workers.session_body(old, worker.register_message())
    workers.session_heard(old)
    assert [entry["worker_epoch"] for entry in cache.stats()["workers"]] == [newer.epoch]


def test_a_replaced_worker_does_not_take_its_id_back(cache: Cache, keep: Keep) -> None:
    """Two processes under one id would else throw each other out for ever."""
    worker = keep(FakeWorker(cache)).wait_registered()
    workers = cache.process._service.workers
    old = workers._by_id[worker.worker_id].link
    newer = keep(FakeWorker(cache)).wait_registered()
    answer = workers.session_opening(Hello(old.key, 9, 0, received=0, epoch=0, name=str(worker.worker_id)))
    assert isinstance(answer, Reject)
    assert answer.code is RejectCode.FENCED
    assert [entry["worker_epoch"] for entry in cache.stats()["workers"]] == [newer.epoch]


def test_few_keys_of_replaced_workers_are_kept(cache: Cache, keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coppice_cache.edge.service.workers.REPLACED_KEYS_MAX", 2)
    workers = cache.process._service.workers
    keys = []
    for _ in range(4):
        worker = keep(FakeWorker(cache)).wait_registered()
        keys.append(workers._by_id[worker.worker_id].link.key)
        worker.stop()  # the first, whose key is forgotten, would come back
    assert list(workers._replaced_keys) == keys[1:3], "the oldest is forgotten, and the newest was not replaced"


def test_what_an_ended_client_still_says_is_ignored(cache: Cache, keep: Keep) -> None:
    keep(FakeWorker(cache)).wait_registered()
    service = cache.process._service
    client = keep(StreamClient(cache))
    link = service.clients._by_epoch[SchedulerEpoch(client.epoch)].link
    assert link is not None
    with service.entered() as core:
        core.end_client(SchedulerEpoch(link.epoch), service.now_ns())
    reconnected = keep(StreamClient(cache, link=client.session))
    assert reconnected.epoch != link.epoch
    service.clients.session_body(link, OpBatch((client.acquire(1, prompt(9)),)))
    service.clients.session_connected(link, False)
    assert cache.stats()["leases"] == 0
    assert SchedulerEpoch(link.epoch) not in service.clients._by_epoch


def test_register_must_name_the_sessions_worker(cache: Cache, keep: Keep) -> None:
    worker = keep(FakeWorker(cache)).wait_registered()
    worker.worker_id = "somebody-else"
    worker.post(worker.register_message())
    wait_for(lambda: worker.rejected, "a refusal")
    assert "somebody-else" in worker.rejected[0].message
    assert [entry["worker_id"] for entry in cache.stats()["workers"]] == ["w"]


@pytest.mark.parametrize(
    ("field", "wrong", "named"), [("num_blocks", 17, "17 blocks"), ("num_blocks", 0, "num_blocks 0")]
)
def test_a_registration_that_contradicts_itself_is_refused(
    cache: Cache, keep: Keep, field: str, wrong: int, named: str
) -> None:
    worker = keep(FakeWorker(cache)).wait_registered()
    setattr(worker, field, wrong)
    worker.post(worker.register_message())
    wait_for(lambda: worker.rejected, "a refusal")
    assert named in worker.rejected[0].message
    cache.audit()


# ---- restarts of the cache service ----


class Recovery:
    """A lease with shared and owned blocks that was granted before the cache service restarts."""

    def __init__(self, cache: Cache, keep: Keep) -> None:
        self.worker = keep(FakeWorker(cache)).wait_registered()
        self.client = keep(StreamClient(cache))
        text = prompt(18)
        first = granted(self.client, 1, 18)
        (published,) = self.client.ask(Publish(lease(1), 0, text[: 16 * 4]))
        assert isinstance(published, Published)
        self.worker.attach(first.owned)
        self.worker.seal(published.handles, published.seals)
        self.grant = granted(self.client, 2, 18)
        self.worker.attach(self.grant.owned)
        self.client.ask(Release(lease(1)))
        self.worker.scheduler_epochs = (SchedulerEpoch(self.client.epoch),)
        self.epoch = self.client.epoch
        self.worker_epoch = self.worker.epoch

    def claim(self, lease_id: LeaseId | None = None) -> LeaseClaim:
        made = claim(self.grant, self.grant.owned, self.grant.shared, self.grant.shared_seals)
        return made if lease_id is None else replace(made, lease_id=lease_id)


def test_leases_re_attach_after_a_restart(keep: Keep, tmp_path: Path) -> None:
    cache = keep(Cache(epoch_file=str(tmp_path / "epoch")))
    recovery = Recovery(cache, keep)
    client, worker = recovery.client, recovery.worker
    first_epoch = client.attached[0].server_epoch
    cache.restart()
    wait_for(lambda: len(client.attached) == 2, "the client attaches")
    assert client.attached[1].fresh
    assert client.attached[1].server_epoch == first_epoch + 1
    assert client.epoch == recovery.epoch, "the session goes on under its epoch"
    worker.wait_registered(2)
    assert worker.epoch == recovery.worker_epoch, "the worker's epoch is alive"
    assert not cache.stats()["workers"][0]["open"], "its ledger is closed until everybody is back"
    client.post(Reattach((recovery.claim(),)))
    wait_for(lambda: client.reattached, "the verdict")
    assert client.reattached[0].accepted == (lease(2),)
    fence = worker.wait_fence()
    assert fence.report
    assert fence.spared == (recovery.epoch,)
    wait_for(lambda: client.workers and client.workers[-1].workers[0].open, "the ledger opens")
    stats = cache.stats()
    assert (stats["leases"], stats["leased_blocks"], stats["free_blocks"]) == (1, 5, 11)
    (extended,) = client.ask(Extend(lease(2), 24))
    assert isinstance(extended, Extended)
    granted_by = {epoch_of(Generation(int(generation))) for generation in generations(extended.owned)}
    assert granted_by == {CacheEpoch(first_epoch + 1)}
    cache.audit()
    assert client.ask(Release(lease(2))) == (Released(lease(2)),)
    wait_for(lambda: cache.stats()["free_blocks"] == 16, "everything is free")


def test_a_client_that_does_not_come_back_is_fenced(keep: Keep, tmp_path: Path) -> None:
    cache = keep(Cache(epoch_file=str(tmp_path / "epoch"), session_ttl_ms=1_500))
    recovery = Recovery(cache, keep)
    recovery.client.stop()
    cache.restart()
    worker = recovery.worker.wait_registered(2)
    fence = worker.wait_fence()
    assert fence.report
    assert recovery.epoch <= fence.up_to_epoch or recovery.epoch in fence.scheduler_epochs
    assert recovery.epoch not in fence.spared
    wait_for(lambda: cache.stats()["free_blocks"] == 16, "its blocks are free after the fence")
    late = keep(StreamClient(cache, link=recovery.client.session))
    assert late.epoch != recovery.epoch, "a fenced session never re-attaches"
    cache.audit()


def test_a_service_that_forgot_its_epoch_learns_it_from_workers(keep: Keep) -> None:
    cache = keep(Cache())
    recovery = Recovery(cache, keep)
    first_epoch = recovery.client.attached[0].server_epoch
    assert first_epoch == 1
    cache.restart()
    wait_for(lambda: recovery.worker.cache_epoch == first_epoch + 1, "the worker hears of the next incarnation")
    wait_for(lambda: recovery.client.attached[-1].server_epoch == first_epoch + 1, "clients hear of it")
    told = [attached.server_epoch for attached in recovery.client.attached]
    assert told == [first_epoch, first_epoch + 1], "no epoch is told twice"
    assert recovery.client.epoch == recovery.epoch, "the session goes on under its epoch"
    recovery.client.post(Reattach((recovery.claim(),)))
    wait_for(lambda: recovery.client.reattached, "the verdict")
    assert recovery.client.reattached[-1].accepted == (lease(2),)
    assert cache.process._service.cache_epoch == first_epoch + 1
    wait_for(lambda: cache.stats()["workers"][0]["open"], "the ledger opens")
    cache.audit()


def test_a_repaired_epoch_is_remembered(keep: Keep, tmp_path: Path) -> None:
    file = tmp_path / "epoch"
    cache = keep(Cache(epoch_file=str(file)))
    worker = keep(FakeWorker(cache)).wait_registered()
    worker.was_registered_by(40)
    worker.post(worker.register_message())
    wait_for(lambda: worker.cache_epoch == 41, "a new incarnation above what the worker knows")
    assert file.read_text() == "41\n"
    cache.restart()
    assert cache.process._service.cache_epoch == 42


def test_a_false_claim_is_refused_after_a_restart(keep: Keep, tmp_path: Path) -> None:
    cache = keep(Cache(epoch_file=str(tmp_path / "epoch")))
    recovery = Recovery(cache, keep)
    cache.restart()
    wait_for(lambda: len(recovery.client.attached) == 2, "the client attaches")
    recovery.worker.wait_registered(2)
    forged = recovery.claim(lease(8))
    false = replace(forged, shared_seals=bytes(len(forged.shared_seals)))
    recovery.client.post(Reattach((recovery.claim(), false)))
    wait_for(lambda: recovery.client.reattached, "the verdict")
    assert recovery.client.reattached[0].accepted == (lease(2),)
    assert recovery.client.reattached[0].refused == (lease(8),)
    assert lease(8) in recovery.worker.wait_fence().lease_ids
    cache.audit()
