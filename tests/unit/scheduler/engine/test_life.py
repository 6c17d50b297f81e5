"""The life of a request, plan by plan."""

from __future__ import annotations

import pytest

from coppice.messages.index import Acquire, AnswerBatch, Extend, Publish, Release
from coppice.request_log.stages import Stage, StageKind
from coppice_scheduler.core.state.request import Finish, OutputError, OutputErrorCode
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import BLOCK, MS, Bench, rows_of, tokens_of
from tests.fakes.scheduler.scheduler_worker import u32


def settings(**fields: object) -> SchedulerSettings:
    return SchedulerSettings(**{"instance": b"instance", "max_running": 8, "max_step_tokens": 64, **fields})  # type: ignore[arg-type]


def test_a_request_from_queue_to_release() -> None:
    bench = Bench()
    assert bench.submit("r", 10, max_new=2) is None
    (acquire,) = bench.ops(Acquire)
    assert isinstance(acquire, Acquire)
    assert (acquire.reserve_tokens, acquire.tokens) == (11, tokens_of(10))
    assert acquire.lease_id == b"instance" + (1).to_bytes(8, "little")
    assert [(c.worker_id, c.load_cost) for c in acquire.candidates] == [("w", 0)]

    bench.answer(cached_blocks=1)
    first, second = bench.plans
    (start,) = first.attach
    assert (start.num_computed_tokens, start.tokens, len(start.owned) // 8) == (4, tokens_of(10), 2)
    assert first.zero == start.owned[:8]
    assert rows_of(first) == {1: 6}
    assert rows_of(second) == {1: 1}, "the decode of a token that nobody has seen yet"

    bench.result({1: 7})
    assert bench.text("r") == [7]
    (publish,) = bench.ops(Publish)
    assert isinstance(publish, Publish)
    assert (publish.first_block, publish.num_named_blocks, publish.tokens) == (1, 1, b"")
    bench.answer()
    bench.result({1: 8})
    assert (bench.last("r").finish, bench.last("r").num_output_tokens) == (Finish.LENGTH, 2)
    assert bench.last("r").num_cached_tokens == 4
    assert not bench.ops(Release), "no release before the step that removes it has completed"
    seals, removal = bench.plans
    assert (len(seals.sealed), len(seals.seals)) == (8, 16)
    assert (seals.rows, u32(removal.detach)) == (b"", [1])
    bench.result()
    assert not bench.ops(Release)
    bench.result()
    assert [op.lease_id for op in bench.ops(Release)] == [acquire.lease_id]
    bench.answer()
    assert bench.core.is_idle()


def test_a_stop_token_is_counted_and_not_emitted_and_the_row_after_it_is_dropped() -> None:
    bench = Bench()
    bench.submit("r", 3, max_new=9, stop_token_ids=frozenset({5}))
    bench.settle()
    bench.result({1: 6})
    bench.result({1: 5})
    last = bench.last("r")
    assert (last.finish, last.stop_token, last.num_output_tokens) == (Finish.STOP, b"\5\0\0\0", 2)
    assert bench.text("r") == [6]
    late = bench.plans[0]
    assert late.repeat_rows, "the decode after the stop token was on its way"
    bench.result({1: 9})
    assert bench.text("r") == [6]


def test_nothing_is_planned_past_the_last_token() -> None:
    bench = Bench(settings(max_steps_in_flight=5))
    bench.submit("r", 3, max_new=3)
    bench.settle()
    assert len(bench.plans) == 3
    bench.result({1: 1})
    assert len(bench.plans) == 2
    bench.result({1: 2})
    bench.result({1: 3})
    assert bench.text("r") == [1, 2, 3]


def test_the_context_ends_a_request_that_asks_for_more() -> None:
    bench = Bench(settings(max_context=5))
    bench.submit("r", 3, max_new=100)
    bench.answer()
    bench.result({1: 1})
    bench.result({1: 2})
    assert bench.last("r").finish is Finish.LENGTH


def test_pure_decode_repeats_its_rows() -> None:
    bench = Bench()
    bench.submit("r", 3, max_new=9)
    bench.settle()
    assert [plan.repeat_rows for plan in bench.plans] == [False, False]
    bench.result({1: 1})
    assert bench.plans[-1].repeat_rows
    assert (bench.plans[-1].rows, bench.plans[-1].row_tokens) == (b"", b"")
    bench.submit("s", 3, max_new=9)
    bench.settle()
    bench.result({1: 1})
    assert rows_of(bench.plans[-1]) == {1: 1, 2: 3}
    bench.result({1: 1})
    bench.settle()
    assert rows_of(bench.plans[-1]) == {1: 1, 2: 1}
    bench.settle()
    bench.result({1: 1, 2: 1})
    assert bench.plans[-1].repeat_rows


def test_prefill_goes_in_chunks_after_the_decodes() -> None:
    bench = Bench(settings(max_step_tokens=8, max_chunk_tokens=6, max_steps_in_flight=1, max_running=4))
    bench.submit("a", 4, max_new=50)
    bench.answer()
    bench.result({1: 1})
    bench.submit("b", 10)
    bench.submit("c", 10)
    bench.answer()
    bench.result({1: 1})
    assert rows_of(bench.plans[0]) == {1: 1, 2: 6, 3: 1}
    bench.result({1: 1})
    assert rows_of(bench.plans[0]) == {1: 1, 2: 4, 3: 3}
    bench.result({1: 1, 2: 1})
    assert rows_of(bench.plans[0]) == {1: 1, 2: 1, 3: 6}


def test_a_row_is_planned_only_onto_its_own_blocks() -> None:
    bench = Bench()
    bench.submit("r", 3, max_new=20)
    bench.answer_with(bench.yes(bench.batches[0][0]))
    assert [rows_of(plan) for plan in bench.plans] == [{1: 3}, {1: 1}]
    bench.result({1: 1})
    assert len(bench.plans) == 1, "block 2 is asked for and not here yet"
    bench.result({1: 2})
    assert not bench.plans
    (extend,) = bench.ops(Extend)
    assert isinstance(extend, Extend)
    assert extend.reserve_tokens == 4 + 1 + BLOCK
    bench.answer()
    (growth,) = bench.plans[0].grow
    assert (growth.sequence_id, len(growth.owned)) == (1, 16)


def test_extends_of_all_sequences_go_in_one_batch() -> None:
    bench = Bench(settings(max_running=2))
    for name in "ab":
        bench.submit(name, 3, max_new=20)
    answers = [bench.yes(op) for batch in bench.batches for op in batch]
    bench.batches.clear()
    for answer in answers:
        bench.core.index_message(AnswerBatch(bench.cache_epoch, (answer,)), 0)
    bench.advance()
    assert [[type(op) for op in batch] for batch in bench.batches] == [[Extend, Extend]]


def test_no_more_is_reserved_than_the_request_can_use() -> None:
    bench = Bench()
    bench.submit("r", 4, max_new=1)
    (acquire,) = bench.ops(Acquire)
    assert isinstance(acquire, Acquire)
    assert acquire.reserve_tokens == 4, "the KV of the only new token is never computed"
    bench.answer()
    assert not bench.ops(Extend)


def test_there_are_no_empty_plans() -> None:
    bench = Bench()
    bench.advance()
    assert not bench.plans
    bench.submit("r", 3)
    bench.answer()
    before = len(bench.plans)
    bench.advance()
    assert len(bench.plans) == before == 2


def test_cancel_before_the_attach_releases_at_once() -> None:
    bench = Bench(settings(max_steps_in_flight=1, max_step_tokens=8, max_chunk_tokens=8))
    bench.submit("a", 12)
    bench.answer()
    bench.submit("b", 12)
    bench.answer_with(*(bench.yes(op) for op in bench.batches[0]))
    bench.cancel("b")
    assert len(bench.ops(Release)) == 1
    assert bench.last("b").finish is Finish.CANCELLED


def test_cancel_while_asking_releases_what_comes() -> None:
    bench = Bench()
    bench.submit("r", 3)
    bench.cancel("r")
    assert bench.last("r").finish is Finish.CANCELLED
    assert not bench.ops(Release)
    bench.answer_with(bench.yes(bench.batches[0][0]))
    assert len(bench.ops(Release)) == 1
    assert not bench.plans


def test_cancel_while_running_emits_nothing_after() -> None:
    bench = Bench()
    bench.submit("r", 3)
    bench.answer()
    bench.core.cancel("r", 0, Finish.STOP)
    bench.advance()
    assert bench.last("r").finish is Finish.STOP
    bench.result({1: 1})
    bench.result({1: 2})
    assert bench.text("r") == []
    assert u32(bench.plans[0].detach) == [1]
    bench.cancel("r")
    bench.cancel("nobody")
    assert len(bench.outputs) == 1


ABORTED = OutputError(OutputErrorCode.ABORTED, "aborted")


@pytest.mark.parametrize("reached", ["asking", "granted", "decoding"])
def test_an_end_with_an_error_is_the_one_end_and_gives_all_back(reached: str) -> None:
    bench = Bench()
    bench.submit("r", 3)
    if reached != "asking":
        bench.answer()
    if reached == "decoding":
        bench.result({1: 1})
    assert bench.core.end("r", ABORTED, bench.now_ns)
    assert not bench.core.end("r", ABORTED, bench.now_ns), "it has ended in this turn"
    bench.advance()
    assert (bench.last("r").finish, bench.last("r").error) == (Finish.ERROR, ABORTED)
    bench.settle()
    while bench.plans:
        bench.result(dict.fromkeys(rows_of(bench.plans[0]), 9))
    bench.settle()
    assert len(bench.outputs) == 1 + (reached == "decoding")
    assert bench.core.is_idle()
    assert not bench.core.end("r", ABORTED, bench.now_ns)


def test_the_last_output_tells_where_the_time_went() -> None:
    bench = Bench(settings(max_chunk_tokens=4, max_steps_in_flight=1))
    bench.submit("r", 6, max_new=2)
    bench.advance(1)
    bench.answer()
    for sampled in ({}, {1: 1}, {1: 2}):
        bench.now_ns += 2 * MS
        bench.result(sampled)
    assert bench.last("r").stages == (
        Stage(StageKind.ACQUIRE, 0, 1 * MS),
        Stage(StageKind.PREFILL, 1 * MS, 5 * MS, "w", 6),
        Stage(StageKind.DECODE, 5 * MS, 7 * MS, "w"),
    )
    assert bench.last("r").chunks == ((1 * MS, 3 * MS, 4), (3 * MS, 5 * MS, 2))


@pytest.mark.parametrize(
    "wrong", [{"instance": b"short"}, {"max_running": 65}, {"max_chunk_tokens": 0}, {"max_decode_steps": 129}]
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        settings(**wrong)
