"""A session's vouchers are signed once for each worker epoch, and forgotten with it (rule 1)."""

from __future__ import annotations

from coppice.ids import SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import Workers
from coppice.session.vouchers import Vouchers
from tests.unit.cache.world import KEY, V, W, World, registration

X = WorkerId("x")


class Signer(Vouchers):
    """Remembers what it signed for schedulers."""

    def __init__(self) -> None:
        super().__init__(KEY)
        self.signed: list[tuple[WorkerId, SchedulerEpoch]] = []

    def of_scheduler(self, worker_id: WorkerId, worker_epoch: WorkerEpoch, epoch: SchedulerEpoch) -> bytes:
        self.signed.append((worker_id, epoch))
        return super().of_scheduler(worker_id, worker_epoch, epoch)


def signing() -> tuple[World, Signer]:
    world, signer = World(), Signer()
    world.core.state.vouchers = signer
    return world, signer


def end_worker(world: World, worker_id: WorkerId) -> None:
    world.core.end_worker(worker_id, world.now_ns)
    world.collect()


def shown(world: World, session: SchedulerEpoch) -> dict[WorkerId, bytes]:
    """What the session was told last."""
    heard = [message for message in world.told(session) if isinstance(message, Workers)][-1]
    return {worker.worker_id: worker.voucher for worker in heard.workers}


def test_a_change_of_one_worker_has_nothing_signed_for_the_others() -> None:
    world, signer = signing()
    world.register(registration(W))
    first, second = world.attach(), world.attach()
    world.register(registration(V))
    world.register(registration(X))
    before = [shown(world, session) for session in (first, second)]
    assert sorted(signer.signed) == sorted((worker, epoch) for worker in (W, V, X) for epoch in (first, second))
    end_worker(world, X)
    world.attach(first)
    assert len(signer.signed) == 6
    assert [
        {**shown(world, session), X: old[X]} for session, old in zip((first, second), before, strict=True)
    ] == before


def test_a_worker_that_comes_back_under_another_epoch_has_another_voucher() -> None:
    world, signer = signing()
    world.register(registration(W))
    session = world.attach()
    before = shown(world, session)
    world.register(registration(W))
    after = shown(world, session)
    assert after.keys() == before.keys()
    assert after[W] != before[W]
    assert signer.signed == [(W, session)] * 2


def test_vouchers_go_with_the_worker_and_with_the_session() -> None:
    world, signer = signing()
    for _ in range(5):
        for worker_id in (W, V):
            world.register(registration(worker_id))
        session = world.session = world.session or world.attach()
        assert len(world.core.state.sessions[session].vouchers) == 2
        end_worker(world, V)
        assert [worker_id for worker_id, _ in world.core.state.sessions[session].vouchers] == [W]
    world.register(registration(V))
    world.core.end_client(session, world.now_ns)
    world.collect()
    signed = len(signer.signed)
    assert world.attach() != session
    assert len(signer.signed) == signed + 2
