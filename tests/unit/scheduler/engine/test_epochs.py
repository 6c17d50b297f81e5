"""What a restarted cache service hears of epochs that are over and of leases that may still run."""

from __future__ import annotations

from msgspec.structs import replace

from coppice.ids import CacheEpoch, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import Abandon, DeadWorker, Reattach, Reattached, Workers
from coppice_scheduler.core.state.workers import Worker
from tests.fakes.scheduler.scheduler_bench import W
from tests.unit.scheduler.engine.test_outages import claims_after_restart, lease, two_running


def test_a_restarted_cache_hears_of_what_another_refused_as_long_as_it_may_run() -> None:
    """Its fence may die with the service that refused the claim."""
    bench = two_running(seen=True)
    bench.settle()

    assert claims_after_restart(bench, 2) == [lease(1)]
    bench.core.index_message(Reattached(CacheEpoch(2), (), (lease(1),)), bench.now_ns)
    bench.advance()
    assert not bench.ops(Abandon), "it was told that the lease is over"
    assert claims_after_restart(bench, 3) == [lease(1)]
    assert [op.lease_id for op in bench.ops(Abandon)] == [lease(1)]
    bench.settle()
    while bench.plans:
        bench.result({1: 1})
    assert claims_after_restart(bench, 4) == [], "the step that removed it has completed"


def test_a_restarted_cache_hears_which_worker_epochs_are_over() -> None:
    """They were given up, and nothing there is claimed; the worker may live and know nothing of it."""
    bench = two_running()
    bench.core.index_message(Workers(CacheEpoch(1), ()), bench.now_ns)
    bench.advance()
    bench.core.index_attached(SchedulerEpoch(1), CacheEpoch(2), True, bench.now_ns)
    bench.advance()
    (reattach,) = bench.other_messages
    assert isinstance(reattach, Reattach)
    assert reattach.claims == ()
    assert reattach.dead_workers == (DeadWorker(W, WorkerEpoch(1)),)


def test_under_another_scheduler_epoch_no_worker_epoch_is_over() -> None:
    """Nothing of the old one can run there any more: a worker whose epoch lives on is used again."""
    bench = two_running()
    bench.core.index_message(Workers(CacheEpoch(1), ()), bench.now_ns)
    bench.advance()
    assert bench.core._life.workers[W].dead_epochs
    bench.core.index_attached(SchedulerEpoch(2), CacheEpoch(2), True, bench.now_ns)
    assert not bench.core._life.workers[W].dead_epochs


def test_ids_that_come_and_go_leave_nothing() -> None:
    """Whoever registers under one id after another is listed, and never attaches."""
    bench = two_running()
    (listed,) = [worker.info for worker in bench.core._life.workers.values()]
    assert listed is not None
    for number in range(200):
        stranger = replace(listed, worker_id=WorkerId(f"stranger {number}"))
        bench.core.index_message(Workers(CacheEpoch(1), (listed, stranger)), bench.now_ns)
        assert len(bench.core._life.workers) == 2
    bench.core.index_message(Workers(CacheEpoch(1), (listed,)), bench.now_ns)
    assert list(bench.core._life.workers) == [W]


def test_the_latest_dead_epochs_are_remembered() -> None:
    worker = Worker(W)
    for epoch in range(1, 20):
        worker.bury(WorkerEpoch(epoch))
    worker.bury(WorkerEpoch(15))
    assert list(worker.dead_epochs) == [12, 13, 14, 16, 17, 18, 19, 15]
