"""What a request knows of the future of its prompt reaches the cache service."""

from __future__ import annotations

import pytest

from coppice.ids import SchedulerEpoch
from coppice.messages.index import (
    Acquire,
    Gone,
    Invalid,
    Publish,
    Reattach,
    Reattached,
    Release,
    Retain,
    Retained,
)
from coppice.messages.reuse import Reuse
from coppice.messages.step import SamplingParams
from coppice_scheduler.core.state.request import Finish, OutputErrorCode
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import Bench


def only(bench: Bench, kind: type) -> Acquire | Release | Retain:
    (op,) = bench.ops(kind)
    assert isinstance(op, kind)
    return op


@pytest.mark.parametrize("reuse", list(Reuse))
def test_reuse_is_said_with_the_first_op_and_the_last(reuse: Reuse) -> None:
    bench = Bench()
    bench.submit("r", 6, max_new=1, reuse=reuse, call_kind=5)
    acquire = only(bench, Acquire)
    assert isinstance(acquire, Acquire)
    assert (acquire.reuse, acquire.call_kind) == (reuse, 5)
    bench.answer()
    bench.result({1: 7})
    bench.settle()
    bench.result()
    assert only(bench, Release).reuse is reuse


def test_a_prompt_is_retained_once_right_after_its_publication() -> None:
    bench = Bench(SchedulerSettings(instance=b"instance", max_running=6, max_step_tokens=6, retain_priority=70))
    bench.submit("r", 10, retain_ms=9_000)
    bench.answer()
    bench.result()
    assert not bench.ops(Retain), "the second block is not computed yet"
    bench.answer()
    bench.result({1: 7})
    (publish, retain) = bench.batches[0]
    assert isinstance(publish, Publish)
    assert retain == Retain(publish.lease_id, 0, 8, 70, 9_000)
    bench.answer()
    for token in range(4):
        bench.result({1: token})
        bench.settle()
    assert bench.last("r").finish is Finish.LENGTH
    assert not bench.ops(Retain)


def test_a_prompt_that_was_found_is_retained_at_once() -> None:
    bench = Bench()
    bench.submit("r", 10, retain_ms=9_000)
    bench.answer(cached_blocks=2)
    assert only(bench, Retain).end_token == 8


def test_without_a_full_block_there_is_nothing_to_retain() -> None:
    bench = Bench()
    bench.submit("r", 3, max_new=2, retain_ms=9_000)
    bench.answer()
    bench.result({1: 7})
    assert not bench.ops(Retain)


def test_a_retention_without_an_answer_is_said_again_after_a_reattachment() -> None:
    bench = Bench()
    bench.submit("r", 10, retain_ms=9_000)
    bench.answer(cached_blocks=2)
    assert bench.ops(Retain)
    bench.batches.clear()
    bench.core.index_attached(SchedulerEpoch(1), bench.cache_epoch, True, bench.now_ns)
    bench.advance()
    assert not bench.ops(Retain), "its lease has no verdict yet"
    (reattach,) = [message for message in bench.other_messages if isinstance(message, Reattach)]
    accepted = tuple(claim.lease_id for claim in reattach.claims)
    bench.core.index_message(Reattached(bench.cache_epoch, accepted, (), (2,)), bench.now_ns)
    bench.advance()
    assert only(bench, Retain).end_token == 8


def test_answers_to_a_retention() -> None:
    for answer in (Retained, Gone, Invalid):
        bench = Bench(SchedulerSettings(instance=b"instance", max_running=8, max_step_tokens=64, max_retries=0))
        bench.submit("r", 10, retain_ms=9_000)
        bench.answer(cached_blocks=2)
        lease_id = only(bench, Retain).lease_id
        texts = {Retained: (8,), Invalid: ("too long",), Gone: ()}
        said = answer(lease_id, *texts[answer])
        bench.answer_with(*[said if isinstance(op, Retain) else bench.yes(op) for op in bench.batches[0]])
        if answer is Gone:
            error = bench.last("r").error
            assert error is not None
            assert error.code is OutputErrorCode.SESSION_LOST
        else:
            bench.result({1: 7})
            assert bench.text("r") == [7]


def test_log_probabilities_of_the_prompt_are_computed_not_found() -> None:
    """And only as long as they are not there: after a preemption with a token, a match is welcome."""
    bench = Bench()
    bench.submit("r", 10, sampling=SamplingParams(num_logprobs=0, num_prompt_logprobs=0))
    assert only(bench, Acquire).skip_match
    bench.settle()
    bench.result({1: 7})
    publish = bench.ops(Publish)[0]
    bench.answer_with(*[Gone(op.lease_id) if op is publish else bench.yes(op) for op in bench.batches[0]])
    assert not only(bench, Acquire).skip_match
