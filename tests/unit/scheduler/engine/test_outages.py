"""The cache service goes away, comes back, forgets: what is claimed, asked again, dropped."""

from __future__ import annotations

from coppice.ids import CacheEpoch, LeaseId, SchedulerEpoch, WorkerEpoch
from coppice.messages.index import (
    Abandon,
    Acquire,
    AnswerBatch,
    Extend,
    Gone,
    Invalid,
    LeaseDigest,
    LeaseSet,
    NotPublished,
    NotPublishedReason,
    Publish,
    Reattach,
    Reattached,
    Release,
    lease_hash,
)
from coppice_scheduler.core.state.request import OutputErrorCode
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import BLOCK, Bench, W
from tests.fakes.scheduler.scheduler_worker import u32


def settings(**fields: object) -> SchedulerSettings:
    return SchedulerSettings(**{"instance": b"instance", "max_running": 8, "max_step_tokens": 64, **fields})  # type: ignore[arg-type]


def lease(number: int) -> LeaseId:
    return LeaseId(b"instance" + number.to_bytes(8, "little"))


def error_of(bench: Bench, name: str) -> OutputErrorCode:
    error = bench.last(name).error
    assert error is not None
    return error.code


def claims_after_restart(bench: Bench, epoch: int) -> list[LeaseId]:
    """Another cache service is there, under this epoch: what it is told."""
    bench.cache_epoch = CacheEpoch(epoch)
    bench.other_messages.clear()
    bench.core.index_attached(SchedulerEpoch(1), bench.cache_epoch, True, bench.now_ns)
    bench.advance()
    (reattach,) = bench.other_messages
    assert isinstance(reattach, Reattach)
    return [claim.lease_id for claim in reattach.claims]


def two_running(seen: bool = False, num_tokens: int = 3) -> Bench:
    """Request r attached; with `seen`, its first token came out."""
    bench = Bench()
    bench.submit("r", num_tokens, max_new=9)
    bench.settle()
    if seen:
        bench.result({1: 5})
    return bench


def test_answers_of_another_cache_epoch_are_dropped() -> None:
    bench = Bench()
    bench.submit("r", 3)
    (op,) = bench.batches[0]
    bench.core.index_message(AnswerBatch(CacheEpoch(9), (bench.yes(op),)), 0)
    bench.advance()
    assert not bench.plans
    bench.answer()
    assert bench.plans


def test_answers_that_answer_nothing_are_dropped() -> None:
    bench = Bench()
    bench.submit("r", 3)
    batch = bench.batches[0]
    answers = tuple(bench.yes(op) for op in batch)
    bench.answer_with(*answers)
    bench.core.index_message(AnswerBatch(bench.cache_epoch, answers), 0)
    bench.advance()
    assert bench.core.stats().running == 1


def test_a_restarted_cache_hears_the_claims_and_the_open_questions_again() -> None:
    bench = two_running(num_tokens=5)
    bench.submit("s", 3)
    assert [type(op) for batch in bench.batches for op in batch] == [Acquire]
    bench.core.index_lost(0)
    bench.result({1: 6})
    assert len(bench.batches) == 1, "nothing is asked while nobody listens"
    bench.batches.clear()
    bench.cache_epoch = CacheEpoch(2)
    bench.core.index_attached(SchedulerEpoch(1), CacheEpoch(2), True, 0)
    bench.advance()
    (reattach,) = bench.other_messages
    assert isinstance(reattach, Reattach)
    assert [(claim.lease_id, len(claim.owned) // 8) for claim in reattach.claims] == [(lease(1), 3)]
    assert [(type(op), op.lease_id) for op in bench.batches[0]] == [(Acquire, lease(2))]
    bench.core.index_message(Reattached(CacheEpoch(2), (lease(1),), (), (0,)), 0)
    bench.advance()
    assert [(type(op), op.lease_id) for op in bench.batches[-1]] == [(Publish, lease(1))]


def test_a_restarted_cache_hears_of_what_was_abandoned_as_long_as_it_may_run() -> None:
    bench = two_running(seen=True)
    bench.settle()
    bench.core.worker_lost(W, 0)
    bench.advance(30_000)
    assert [op.lease_id for op in bench.ops(Abandon)] == [lease(1)]
    bench.settle()

    assert claims_after_restart(bench, 2) == [lease(1)], "its fence may have died with the old cache service"
    assert [op.lease_id for op in bench.ops(Abandon)] == [lease(1)]
    assert claims_after_restart(bench, 3) == [lease(1)]
    assert [op.lease_id for op in bench.ops(Abandon)][-1:] == [lease(1)]
    bench.settle()
    bench.core.worker_attached(W, WorkerEpoch(1), False, bench.now_ns)
    bench.advance()
    while bench.plans:
        bench.result({1: 1})
    assert claims_after_restart(bench, 4) == [], "the step that removed it has completed"


def test_extends_and_publishes_wait_for_the_verdict_on_their_claim() -> None:
    bench = Bench(settings(extend_ahead_blocks=0))
    bench.submit("r", 7, max_new=9)
    bench.answer_with(bench.yes(bench.batches[0][0]))
    assert bench.ops(Extend)
    bench.core.index_lost(0)
    bench.core.index_attached(SchedulerEpoch(1), CacheEpoch(1), True, 0)
    bench.batches.clear()
    bench.result({1: 1})
    bench.result({1: 2})
    assert not bench.batches
    bench.core.index_message(Reattached(CacheEpoch(1), (lease(1),), (), (0,)), 0)
    bench.advance()
    assert {type(op) for op in bench.batches[0]} == {Extend, Publish}
    bench.settle()
    assert any(plan.repeat_rows for plan in bench.plans)


def test_a_refused_claim_starts_its_request_over() -> None:
    bench = two_running(seen=True)
    bench.core.index_lost(0)
    bench.core.index_attached(SchedulerEpoch(1), CacheEpoch(1), True, 0)
    bench.core.index_message(Reattached(CacheEpoch(1), (), (lease(1), lease(99))), 0)
    bench.advance()
    assert bench.core.stats().total_retries == 1
    assert [op.lease_id for op in bench.ops(Acquire)] == [lease(2)]
    bench.result({1: 1})
    bench.result()
    assert not bench.ops(Release), "the lease is not known there"


def test_under_another_scheduler_epoch_all_start_over_behind_what_was_seen() -> None:
    bench = two_running(seen=True)
    bench.submit("unseen", 3)
    bench.settle()
    bench.result({1: 6})
    bench.submit("asking", 3)
    bench.core.index_lost(0)
    bench.batches.clear()
    bench.core.index_attached(SchedulerEpoch(2), CacheEpoch(1), True, 0)
    bench.advance()
    assert not [output for output in bench.outputs if output.finish is not None]
    assert not bench.other_messages, "there is nothing to claim"
    assert [type(op) for op in bench.batches[0]] == [Acquire] * 3
    while not bench.plans[0].detach:
        bench.result({1: 1, 2: 1})
    assert set(u32(bench.plans[0].detach)) == {1, 2}
    bench.result()
    assert not bench.ops(Release)


def test_a_resumed_link_has_lost_nothing() -> None:
    bench = Bench()
    bench.submit("r", 3)
    bench.core.index_lost(0)
    bench.core.index_attached(SchedulerEpoch(1), CacheEpoch(1), False, 0)
    bench.advance()
    assert (len(bench.batches), bench.other_messages) == (1, [])
    bench.answer()
    assert bench.plans


def test_an_outage_lets_sequences_run_on_with_what_they_have() -> None:
    bench = Bench(settings(extend_ahead_blocks=4))
    bench.submit("r", 3, max_new=30)
    bench.settle()
    bench.core.index_lost(0)
    sampled = 0
    while bench.plans:
        bench.result({1: 9})
        sampled += 1
    assert sampled >= 4 * BLOCK
    bench.core.index_attached(SchedulerEpoch(1), CacheEpoch(1), False, 0)
    bench.advance()
    bench.settle()
    assert bench.plans


def test_a_gone_lease_starts_its_request_over() -> None:
    bench = Bench()
    bench.submit("r", 3, max_new=9)
    bench.answer_with(bench.yes(bench.batches[0][0]))
    bench.answer_with(*(Gone(op.lease_id) for op in bench.batches[0]))
    assert bench.core.stats().total_retries == 1
    assert [op.lease_id for op in bench.ops(Acquire)] == [lease(2)]


def test_an_invalid_acquire_ends_the_request_with_what_was_said() -> None:
    bench = Bench()
    bench.submit("r", 3)
    bench.answer_with(Invalid(lease(1), "unknown domain d"))
    error = bench.last("r").error
    assert error is not None
    assert "unknown domain d" in error.message


def test_a_lease_that_is_not_publishable_is_asked_once() -> None:
    bench = Bench()
    bench.submit("r", 5, max_new=12)
    bench.settle()
    bench.result({1: 9})
    assert len(bench.ops(Publish)) == 1
    while bench.batches:
        answers = [
            NotPublished(op.lease_id, NotPublishedReason.DOMAIN_DISABLED) if isinstance(op, Publish) else bench.yes(op)
            for op in bench.batches[0]
        ]
        bench.answer_with(*answers)
    for _ in range(8):
        bench.result({1: 9})
        assert not bench.ops(Publish)
        bench.settle()


def test_a_different_digest_is_answered_with_the_lease_set() -> None:
    bench = two_running(seen=True)
    bench.core.index_message(LeaseDigest(1, lease_hash(lease(1))), 0)
    bench.advance()
    assert not bench.other_messages
    bench.core.index_message(LeaseDigest(2, lease_hash(lease(1)) ^ 5), 0)
    bench.advance()
    assert bench.other_messages == [LeaseSet((lease(1),))]


def test_a_digest_is_not_compared_while_an_op_is_unanswered() -> None:
    bench = two_running(seen=True)
    bench.submit("s", 3)
    bench.core.index_message(LeaseDigest(7, 7), 0)
    bench.advance()
    assert not bench.other_messages


def publishing() -> Bench:
    """Request r with its first block full: the Publish waits for its answer, alone."""
    bench = Bench()
    bench.submit("r", 5, max_new=19)
    bench.settle()
    bench.result({1: 5})
    assert [[type(op) for op in batch] for batch in bench.batches] == [[Publish]]
    return bench


def test_a_publish_without_an_answer_is_said_again() -> None:
    bench = publishing()
    bench.batches.clear()
    bench.core.index_lost(0)
    bench.core.index_attached(SchedulerEpoch(1), CacheEpoch(1), True, 0)
    bench.core.index_message(Reattached(CacheEpoch(1), (lease(1),), (), (0,)), 0)
    bench.advance()
    bench.result({1: 5})
    (publish,) = bench.ops(Publish)
    assert isinstance(publish, Publish)
    assert publish.first_block == 0


def restarted(bench: Bench) -> None:
    bench.batches.clear()
    bench.cache_epoch = CacheEpoch(2)
    bench.core.index_lost(0)
    bench.core.index_attached(SchedulerEpoch(1), CacheEpoch(2), True, 0)


def test_a_lease_without_a_place_in_a_tree_publishes_when_it_has_one() -> None:
    bench = publishing()
    restarted(bench)
    bench.core.index_message(Reattached(CacheEpoch(2), (lease(1),), ()), 0)
    for _ in range(16):
        bench.result({1: 5})
        assert not bench.ops(Publish), "it has no place yet"
        bench.settle()
    bench.core.index_message(Reattached(CacheEpoch(2), (lease(1),), (), (0,)), 0)
    bench.advance()
    (publish,) = bench.ops(Publish)
    assert isinstance(publish, Publish)
    assert publish.first_block == 0
    assert len(publish.tokens) // 16 >= 2, "all that filled meanwhile"


def test_what_a_restarted_cache_lost_is_published_again() -> None:
    bench = publishing()
    bench.settle()
    bench.result({1: 5})
    bench.settle()
    restarted(bench)
    bench.core.index_message(Reattached(CacheEpoch(2), (lease(1),), (), (0,)), 0)
    bench.advance()
    (publish,) = bench.ops(Publish)
    assert isinstance(publish, Publish)
    assert publish.first_block == 0


def test_what_filled_during_an_outage_is_published_before_the_release() -> None:
    bench = Bench()
    bench.submit("r", 5, max_new=2)
    bench.settle()
    bench.core.index_lost(0)
    bench.result({1: 5})
    bench.result({1: 5})
    bench.result()
    bench.core.index_attached(SchedulerEpoch(1), CacheEpoch(1), False, 0)
    bench.advance()
    assert [type(op) for op in bench.batches[0]] == [Publish, Release]


def test_seals_of_a_dead_epoch_are_not_told_to_the_next_one() -> None:
    bench = publishing()
    bench.core.worker_attached(W, WorkerEpoch(2), True, 0)
    bench.plans.clear()
    bench.settle()
    assert not [plan for plan in bench.plans if plan.sealed]


def test_a_grant_of_a_dead_epoch_is_given_back() -> None:
    bench = Bench()
    bench.submit("r", 3)
    bench.core.worker_attached(W, WorkerEpoch(2), True, 0)
    bench.list_workers(2)
    bench.answer_with(bench.yes(bench.batches[0][0], epoch=1))
    assert [(type(op), op.lease_id) for op in bench.batches[0]] == [(Release, lease(1)), (Acquire, lease(2))]
    assert not bench.plans
    assert bench.core.stats().total_retries == 0, "nothing had begun"
