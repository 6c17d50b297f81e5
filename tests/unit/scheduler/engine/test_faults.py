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
from coppice_scheduler.core.state.request import Finish, OutputErrorCode
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import Bench, W, rows_of
from tests.fakes.scheduler.scheduler_worker import u32


def settings(**fields: object) -> SchedulerSettings:
    return SchedulerSettings(**{"instance": b"instance", "max_running": 8, "max_step_tokens": 64, **fields})  # type: ignore[arg-type]


def lease(number: int) -> LeaseId:
    return LeaseId(b"instance" + number.to_bytes(8, "little"))


def error_of(bench: Bench, name: str) -> OutputErrorCode:
    error = bench.last(name).error
    assert error is not None
    return error.code


def two_running(seen: bool = False, **fields: object) -> Bench:
    """Request r attached; with `seen`, its first token came out."""
    bench = Bench(settings(extend_more_blocks=0, **fields))
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
    bench = two_running(max_retries=1)
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


def test_death_of_a_worker_starts_over_what_it_computed_and_a_second_one_ends_it() -> None:
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


def go_on(bench: Bench, epoch: int) -> None:
    """The worker is back under this epoch, and has room for all that is asked for."""
    bench.plans.clear()
    bench.core.worker_attached(W, WorkerEpoch(epoch), True, bench.now_ns)
    bench.list_workers(epoch)
    bench.advance()
    say_yes(bench, epoch)


def say_yes(bench: Bench, epoch: int) -> None:
    while bench.batches:
        bench.answer_with(*(bench.yes(op, epoch=epoch) for op in bench.batches[0]))


def test_after_the_death_of_its_worker_a_stream_goes_on_behind_what_was_seen() -> None:
    bench = two_running(seen=True)
    go_on(bench, 2)
    (start,) = bench.plans[0].attach
    assert u32(start.tokens) == [100, 101, 102, 5], "what was sent is computed again, not drawn again"
    assert rows_of(bench.plans[0]) == {2: 4}
    bench.result({2: 6})
    assert bench.text("r") == [5, 6]
    while bench.plans:
        bench.result({2: 7})
        bench.settle()
    assert (bench.last("r").finish, bench.text("r")) == (Finish.LENGTH, [5, 6] + [7] * 7)
    assert bench.last("r").num_output_tokens == 9


@pytest.mark.parametrize("max_retries", [0, 1, 3])
def test_a_stream_goes_on_so_many_times_and_then_ends_with_what_stopped_it(max_retries: int) -> None:
    bench = two_running(seen=True, max_retries=max_retries, max_decode_steps=1)
    for epoch in range(2, max_retries + 2):
        go_on(bench, epoch)
        for _ in range(2):  # beyond what was in plans at its worker's death, so nobody suspects it
            bench.result({epoch: epoch})
            say_yes(bench, epoch)
    bench.core.worker_attached(W, WorkerEpoch(99), True, 0)
    bench.advance()
    assert error_of(bench, "r") is OutputErrorCode.WORKER_LOST
    assert len(bench.text("r")) == 1 + 2 * max_retries


def test_a_list_from_before_the_new_epoch_does_not_kill_it() -> None:
    bench = Bench()
    bench.core.worker_attached(W, WorkerEpoch(2), True, 0)
    bench.list_workers(1)
    bench.list_workers(2)
    bench.submit("r", 3)
    assert len(bench.ops(Acquire)) == 1


def test_a_worker_that_is_listed_no_more_is_dead() -> None:
    bench = two_running(seen=True, max_retries=0)
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
    bench = Bench(settings(extend_more_blocks=0, max_retries=0))
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
    assert {op.lease_id for op in bench.ops(Abandon)} == {lease(1), lease(2)}
    bench.settle()
    assert bench.core.stats().waiting == 2
    bench.core.worker_attached(W, WorkerEpoch(1), False, bench.now_ns)
    bench.advance()
    while bench.plans and not bench.plans[0].detach:
        bench.result({1: 1, 2: 1})
    assert u32(bench.plans[0].detach) == [1, 2], "it came back: what was given up is taken off it"
    bench.result()
    assert not bench.ops(Release)


def test_a_worker_where_nobody_listens_loses_its_requests_at_once_through_a_fence() -> None:
    bench = two_running(seen=True)
    bench.core.worker_gone(W, 0)
    bench.advance()
    assert bench.core.stats().running == 1, "its connection stands"
    bench.core.worker_lost(W, 0)
    bench.core.worker_gone(W, 0)
    bench.core.worker_gone(W, 0)
    bench.advance()
    assert [op.lease_id for op in bench.ops(Abandon)] == [lease(1)]
    assert (bench.core.stats().waiting, bench.core.stats().total_retries) == (1, 1)
    bench.settle()
    go_on(bench, 2)
    bench.result({2: 6})
    assert bench.text("r") == [5, 6]


def test_a_worker_that_was_there_after_all_is_taken_what_was_given_up() -> None:
    bench = two_running(seen=True)
    bench.core.worker_lost(W, 0)
    bench.core.worker_gone(W, 0)
    bench.advance()
    bench.settle()
    bench.core.worker_attached(W, WorkerEpoch(1), False, 0)
    bench.advance()
    while not bench.plans[0].detach:
        bench.result({1: 9})
    assert u32(bench.plans[0].detach) == [1]
    bench.settle()
    assert bench.text("r") == [5], "what it computed after it was given up is nobody's"


def test_results_that_answer_no_plan_change_nothing() -> None:
    bench = two_running()
    plan = bench.plans[0]
    bench.result({1: 5})
    bench.plans.insert(0, plan)
    bench.result({1: 5})
    assert bench.text("r") == [5]
