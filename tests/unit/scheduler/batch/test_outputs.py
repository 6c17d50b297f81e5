"""How tokens leave: many streams in one batch, all at the end, or with their log-probabilities."""

from __future__ import annotations

import numpy as np

from coppice.ids import SequenceId, WorkerEpoch
from coppice.messages.step import Refusal, RefusalCode, SamplingParams, StepResult, TokenLogprobs
from coppice.request_log.stages import Preemption
from coppice_scheduler.core.state.request import Finish, Output
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_scheduler.core.state.slot_table import FIRST_SLOTS, STOPS_MAX, TAIL_MAX
from tests.fakes.scheduler.scheduler_bench import BLOCK, Bench, W
from tests.fakes.scheduler.scheduler_index import FakeIndex
from tests.fakes.scheduler.scheduler_worker import u32
from tests.fakes.scheduler.scheduler_world import World


def settings(**fields: object) -> SchedulerSettings:
    return SchedulerSettings(**{"instance": b"instance", "max_running": 8, "max_step_tokens": 64, **fields})  # type: ignore[arg-type]


def told(bench: Bench, *sequence_ids: int, token: int = 9) -> tuple[list[int], list[int], list[Output]]:
    """Complete the oldest plan; which tokens left for which numbers, and which outputs."""
    plan = bench.plans.pop(0)
    result = StepResult(
        plan.step, np.array(sequence_ids, "<u4").tobytes(), np.full(len(sequence_ids), token, "<u4").tobytes()
    )
    bench.core.worker_result(W, result, bench.now_ns)
    effects = bench.advance()
    numbers = [number for batch in effects.tokens for number in u32(batch.numbers)]
    tokens = [found for batch in effects.tokens for found in u32(batch.tokens)]
    return numbers, tokens, list(effects.outputs)


def logprobs(sequence_id: int, first: int, *values: float, top: int = 0) -> TokenLogprobs:
    count = len(values)
    return TokenLogprobs(
        SequenceId(sequence_id),
        first,
        top,
        np.array(values, "<f4").tobytes(),
        np.arange(count * top, dtype="<u4").tobytes(),
        np.arange(count * top, dtype="<f4").tobytes(),
        ranks=(-np.array(values)).astype("<u4").tobytes(),
    )


def step(bench: Bench, sampled: dict[int, int], *reported: TokenLogprobs) -> tuple[Output, ...]:
    plan = bench.plans.pop(0)
    result = StepResult(
        plan.step,
        np.array(list(sampled), "<u4").tobytes(),
        np.array(list(sampled.values()), "<u4").tobytes(),
        logprobs=reported,
    )
    bench.core.worker_result(W, result, bench.now_ns)
    return bench.advance().outputs


def floats(packed: bytes) -> list[float]:
    return np.frombuffer(packed, "<f4").tolist()


def test_streams_share_a_batch_and_who_ends_has_its_token_in_the_last_output() -> None:
    bench = Bench()
    bench.hold = True
    for name, most in (("a", 3), ("b", 2), ("c", 9)):
        bench.submit(name, 3, max_new=most)
    bench.advance()
    bench.settle()
    assert told(bench, 1, 2, 3) == ([1, 2, 3], [9, 9, 9], [])
    numbers, tokens, (last,) = told(bench, 1, 2, 3, token=8)
    assert (numbers, tokens) == ([1, 3], [8, 8])
    assert (last.request_id, u32(last.tokens), last.finish, last.num_output_tokens) == ("b", [8], Finish.LENGTH, 2)
    assert bench.text("b") == [9, 8]


def test_who_does_not_stream_gets_everything_at_the_end() -> None:
    bench = Bench()
    bench.submit("r", 3, max_new=3, streams=False)
    bench.settle()
    assert told(bench, 1, token=5) == ([], [], [])
    assert told(bench, 1, token=6) == ([], [], [])
    _, _, (last,) = told(bench, 1, token=7)
    assert u32(last.tokens) == [5, 6, 7]


def test_a_cancelled_one_keeps_what_it_has() -> None:
    bench = Bench()
    bench.submit("r", 3, max_new=9, streams=False)
    bench.submit("s", 3, max_new=9)
    bench.settle()
    while not all(bench.core._life.requests[name].num_output_tokens for name in "rs"):
        bench.result(dict.fromkeys(u32(bench.plans[0].rows) or [1, 2], 5))
    assert u32(bench.core._life.requests["s"].all_tokens())[-1] == 5
    bench.cancel("r")
    bench.cancel("s")
    assert set(u32(bench.last("r").tokens)) == {5}
    assert bench.last("s").tokens == b"", "they left as they came"
    assert len(bench.text("s")) == bench.last("s").num_output_tokens


def test_a_long_output_is_whole() -> None:
    """Tokens pass through the tail of a slot: across blocks, and where blocks are larger than it."""
    bench = Bench(settings(max_context=4 * TAIL_MAX))
    bench.submit("r", 3, max_new=3 * TAIL_MAX, streams=False)
    for token in range(3 * TAIL_MAX):
        bench.settle()
        while bench.plans[0].rows == b"" and not bench.plans[0].repeat_rows:
            bench.result()
            bench.settle()
        bench.result({1: token})
    assert u32(bench.last("r").tokens) == list(range(3 * TAIL_MAX))


def test_a_block_may_be_longer_than_what_a_slot_keeps() -> None:
    world = World(settings(max_context=512), FakeIndex(4 * TAIL_MAX), 1)
    world.add_worker("a", 4)
    world.attach_index()
    world.submit("r", [1, 2, 3], 3 * TAIL_MAX, seed=5)
    world.run()
    assert len(world.outcomes["r"].tokens) == 3 * TAIL_MAX, "the world compares them with the reference"


def test_more_running_than_the_first_slots() -> None:
    count = 2 * FIRST_SLOTS + 3
    bench = Bench(settings(max_running=count, max_step_tokens=1024, max_chunk_tokens=8), num_blocks=4096)
    bench.hold = True
    for number in range(count):
        bench.submit(str(number), 1, max_new=2, tenant=str(number))
    bench.advance()
    bench.settle()
    while bench.plans:
        rows = {row: row for row in u32(bench.plans[0].rows)}
        bench.result(rows)
        bench.settle()
    assert [len(bench.text(str(number))) for number in range(count)] == [2] * count
    assert len(bench.core._life.workers[W].table) == 0


def test_stop_tokens_beyond_those_that_a_slot_holds() -> None:
    bench = Bench()
    stops = frozenset(range(50, 50 + STOPS_MAX + 2))
    bench.submit("few", 3, max_new=9, stop_token_ids=frozenset({50 + STOPS_MAX - 1}))
    bench.submit("many", 3, max_new=9, stop_token_ids=stops)
    bench.settle()
    while not any(output.finish for output in bench.outputs):
        bench.result(dict.fromkeys(u32(bench.plans[0].rows) or [1, 2], 50 + STOPS_MAX + 1))
    assert bench.last("many").finish is Finish.STOP
    assert bench.text("many") == []
    assert "few" in bench.core._life.requests


# --- log-probabilities


def with_logprobs(top: int = 0, **fields: object) -> Bench:
    bench = Bench()
    bench.submit("r", 3, max_new=9, sampling=SamplingParams(num_logprobs=top), **fields)
    bench.settle()
    return bench


def test_log_probabilities_leave_with_their_tokens() -> None:
    bench = with_logprobs(top=2)
    (output,) = step(bench, {1: 5}, logprobs(1, 3, -0.5, top=2))
    assert (u32(output.tokens), output.finish) == ([5], None)
    (found,) = output.logprobs
    assert (found.first_position, floats(found.chosen), len(found.top_ids), len(found.top)) == (3, [-0.5], 8, 8)
    (output,) = step(bench, {1: 6}, logprobs(1, 4, -1.5, top=2))
    assert (u32(output.tokens), floats(output.logprobs[0].chosen)) == ([6], [-1.5])


def test_that_of_a_stop_token_counts_and_those_behind_it_do_not() -> None:
    bench = with_logprobs(stop_token_ids=frozenset({7}))
    (output,) = step(bench, {1: 7}, logprobs(1, 3, -0.5, -9.0))
    assert output.finish is Finish.STOP
    assert (output.tokens, [floats(found.chosen) for found in output.logprobs]) == (b"", [[-0.5]])


def test_who_does_not_stream_gets_them_at_the_end() -> None:
    bench = with_logprobs(streams=False)
    assert step(bench, {1: 5}, logprobs(1, 3, -0.5)) == ()
    assert step(bench, {1: 6}, logprobs(1, 4, -0.25)) == ()
    bench.cancel("r")
    assert [floats(found.chosen) for found in bench.last("r").logprobs] == [[-0.5], [-0.25]]


def test_what_is_computed_again_is_not_reported_again() -> None:
    bench = with_logprobs()
    step(bench, {1: 5}, logprobs(1, 1, -1.0, -2.0, -3.0))
    life = bench.core._life
    life.preempt(life.requests["r"], Preemption.POOL, bench.now_ns)
    bench.advance()
    while not bench.plans[0].attach:
        bench.result({1: 6} if u32(bench.plans[0].rows) else {})
        bench.settle()
    (output,) = step(bench, {2: 6}, logprobs(2, 1, -1.0, -2.0, -3.0, -4.0))
    (found,) = output.logprobs
    assert (found.first_position, floats(found.chosen), u32(found.ranks)) == (4, [-4.0], [4])


# --- what else the last output says


def test_written_tokens_are_whole_blocks_of_the_prompt_beyond_the_cached_ones() -> None:
    bench = Bench()
    bench.submit("r", 4 * BLOCK + 2, max_new=1)
    bench.answer(cached_blocks=1)
    bench.result({1: 5})
    last = bench.last("r")
    assert (last.num_cached_tokens, last.num_written_tokens) == (BLOCK, 3 * BLOCK)


def test_nothing_counts_as_written_where_nothing_may_be_published() -> None:
    bench = Bench()
    bench.submit("r", 4 * BLOCK + 2, max_new=1)
    bench.answer()
    bench.core._life.requests["r"].lease.publishable = False  # type: ignore[union-attr]
    bench.result({1: 5})
    assert bench.last("r").num_written_tokens == 0


def test_a_request_survives_its_worker_whether_its_tokens_were_seen_or_not() -> None:
    bench = Bench()
    bench.submit("seen", 3, max_new=9)
    bench.submit("unseen", 3, max_new=9, streams=False)
    bench.settle()
    while not all(bench.core._life.requests[name].num_output_tokens for name in ("seen", "unseen")):
        bench.result(dict.fromkeys(u32(bench.plans[0].rows) or [1, 2], 5))
    bench.list_workers(2)
    bench.core.worker_attached(W, WorkerEpoch(2), True, bench.now_ns)
    bench.advance()
    for name in ("seen", "unseen"):
        state = bench.core._life.requests[name]
        assert (state.num_retries, set(u32(state.all_tokens()[12:]))) == (1, {5}), "it goes on with what it has"
    assert set(bench.text("seen")) == {5}
    assert not bench.text("unseen")


def test_a_refusal_does_not_stop_the_others_of_its_step() -> None:
    bench = Bench()
    bench.hold = True
    bench.submit("a", 3, max_new=9)
    bench.submit("b", 3, max_new=9)
    bench.advance()
    bench.settle()
    bench.result({2: 5}, refusals=(Refusal(SequenceId(1), RefusalCode.NOT_RESERVED, 0),))
    assert bench.text("b") == [5]
    assert bench.core._life.requests["a"].num_retries == 1
