"""Workers refuse, die and go away: what becomes of the requests that it meets."""

from __future__ import annotations

import pytest

from coppice.ids import CacheEpoch, LeaseId, SchedulerEpoch, SequenceId, WorkerEpoch
from coppice.messages.index import (
    Abandon,
    Acquire,
    AnswerBatch,
    Release,
)
from coppice.messages.step import Refusal, RefusalCode
from coppice_scheduler.core.state.request import OutputErrorCode
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import Bench, W
from tests.fakes.scheduler.scheduler_worker import u32


def settings(**fields: object) -> SchedulerSettings:
    return SchedulerSettings(**{"instance": b"instance", "max_running": 8, "max_step_tokens": 64, **fields})  # type: ignore[arg-type]


def lease(number: int) -> LeaseId:
    return LeaseId(b"instance" + number.to_bytes(8, "little"))


def error_of(bench: Bench, name: str) -> OutputErrorCode:
    error = bench.last(name).error
    assert error is not None
    return error.code


def two_running(seen: bool = False) -> Bench:
    """Request r attached; with `seen`, its first token came out."""
    bench = Bench()
    bench.submit("r", 3, max_new=9)
    bench.settle()
    if seen:
        bench.result({1: 5})
    return bench


# --- refusals by the worker

# Grammars: batch/test_grammars.py.
NOT_BLOCKS = (RefusalCode.FENCED, RefusalCode.WRONG_SEAL, RefusalCode.GRAMMAR, RefusalCode.GRAMMAR_PENDING)


@pytest.mark.parametrize("code", [code for code in RefusalCode if code not in NOT_BLOCKS])
def test_a_refused_sequence_starts_over_once_and_then_ends_naming_the_code(code: RefusalCode) -> None:
    bench = two_running()
    bench.result(refusals=(Refusal(SequenceId(1), code, 77),))
    bench.result(refusals=(Refusal(SequenceId(1), code, 77),))
    assert not bench.ops(Release)
    assert u32(bench.plans[0].detach) == [1]
    assert [op.lease_id for op in bench.ops(Acquire)] == [lease(2)]
    bench.result()
    assert [op.lease_id for op in bench.ops(Release)] == [lease(1)], "released, not abandoned: the worker answered"
    bench.settle()
    bench.result(refusals=(Refusal(SequenceId(2), code, 77),))
    error = bench.last("r").error
    assert error is not None
    assert error.code is OutputErrorCode.INTERNAL
    assert code.value in error.message


def test_a_fenced_sequence_that_starts_over_in_vain_says_that_the_session_is_lost() -> None:
    bench = Bench(settings(max_retries=0))
    bench.submit("r", 3)
    bench.settle()
    bench.result(refusals=(Refusal(SequenceId(1), RefusalCode.FENCED, 0),))
    assert error_of(bench, "r") is OutputErrorCode.SESSION_LOST


def test_a_result_without_the_token_that_was_due_is_a_fault() -> None:
    bench = two_running()
    bench.result({})
    assert bench.core.stats().total_retries == 1


# --- death and absence of workers


def test_death_of_a_worker_retries_once_what_nobody_has_seen() -> None:
    bench = two_running()
    bench.list_workers(2)
    bench.advance()
    assert not bench.ops(Acquire), "the new epoch is not attached yet"
    assert [op.lease_id for op in bench.ops(Release)] == [lease(1)], "a dead epoch touches nothing any more"
    bench.core.worker_attached(W, WorkerEpoch(2), True, 0)
    bench.advance()
    (op,) = [op for op in bench.ops(Acquire) if op.lease_id == lease(2)]
    bench.plans.clear()
    for batch in bench.batches:
        answers = tuple(bench.yes(op, epoch=2) for op in batch)
        bench.core.index_message(AnswerBatch(bench.cache_epoch, answers), 0)
    bench.batches.clear()
    bench.advance()
    assert bench.plans[0].step == 1
    bench.core.worker_attached(W, WorkerEpoch(3), True, 0)
    bench.advance()
    assert error_of(bench, "r") is OutputErrorCode.QUARANTINED
    assert op.lease_id == lease(2)


def test_death_of_a_worker_ends_what_was_seen() -> None:
    bench = two_running(seen=True)
    bench.core.worker_attached(W, WorkerEpoch(2), True, 0)
    bench.advance()
    assert error_of(bench, "r") is OutputErrorCode.WORKER_LOST
    assert bench.text("r") == [5]


def test_a_list_from_before_the_new_epoch_does_not_kill_it() -> None:
    bench = Bench()
    bench.core.worker_attached(W, WorkerEpoch(2), True, 0)
    bench.list_workers(1)
    bench.list_workers(2)
    bench.submit("r", 3)
    assert len(bench.ops(Acquire)) == 1


def test_a_worker_that_is_listed_no_more_is_dead() -> None:
    bench = two_running(seen=True)
    bench.list_workers()
    bench.advance()
    assert error_of(bench, "r") is OutputErrorCode.WORKER_LOST


def test_a_restarted_cache_that_lists_nobody_yet_kills_nobody() -> None:
    bench = two_running(seen=True)
    bench.core.index_lost(0)
    bench.cache_epoch = CacheEpoch(2)
    bench.core.index_attached(SchedulerEpoch(1), CacheEpoch(2), True, 0)
    bench.list_workers()
    bench.advance()
    bench.result({1: 6})
    assert bench.text("r") == [5, 6]


def test_a_lost_connection_keeps_plans_in_flight() -> None:
    bench = two_running()
    bench.core.worker_lost(W, 0)
    bench.advance()
    assert not bench.outputs
    bench.core.worker_attached(W, WorkerEpoch(1), False, 0)
    bench.advance()
    bench.result({1: 5})
    bench.result({1: 6})
    assert bench.text("r") == [5, 6]
    assert [plan.step for plan in bench.plans] == [3, 4]


def test_a_fresh_link_to_the_same_epoch_has_lost_the_sequences_and_keeps_the_seals() -> None:
    bench = Bench()
    bench.submit("r", 5, max_new=9)
    bench.settle()
    bench.result({1: 5})
    bench.settle()
    bench.result({1: 5})
    sealed = [plan.sealed for plan in bench.plans if plan.sealed]
    assert len(sealed) == 1
    bench.plans.clear()
    bench.core.worker_attached(W, WorkerEpoch(1), True, 0)
    bench.advance()
    assert error_of(bench, "r") is OutputErrorCode.WORKER_LOST
    assert [(plan.step, plan.sealed) for plan in bench.plans] == [(1, sealed[0])]
    assert not bench.plans[0].detach


def test_a_worker_that_stays_away_loses_its_requests_through_a_fence() -> None:
    bench = two_running(seen=True)
    bench.submit("unseen", 3)
    bench.settle()
    bench.result({1: 6})
    assert bench.plans[-1].attach
    bench.core.worker_lost(W, 0)
    bench.advance()
    assert bench.core.next_wakeup_ns() == 30_000 * 1_000_000
    bench.advance(30_000)
    assert error_of(bench, "r") is OutputErrorCode.WORKER_LOST
    assert {op.lease_id for op in bench.ops(Abandon)} == {lease(1), lease(2)}
    bench.settle()
    assert bench.core.stats().waiting == 1
    bench.core.worker_attached(W, WorkerEpoch(1), False, bench.now_ns)
    bench.advance()
    while bench.plans and not bench.plans[0].detach:
        bench.result({1: 1, 2: 1})
    assert u32(bench.plans[0].detach) == [1, 2], "it came back: what was given up is taken off it"
    bench.result()
    assert not bench.ops(Release)


def test_results_that_answer_no_plan_change_nothing() -> None:
    bench = two_running()
    plan = bench.plans[0]
    bench.result({1: 5})
    bench.plans.insert(0, plan)
    bench.result({1: 5})
    assert bench.text("r") == [5]
