"""A request that another planner served before goes on behind what its client has."""

from __future__ import annotations

import pytest

from coppice.messages.index import Acquire
from coppice.messages.step import SamplingParams
from coppice_scheduler.core.state.request import Finish, OutputErrorCode, RefusedReason, Resumed
from coppice_scheduler.core.state.settings import SchedulerSettings, TenantLimits
from tests.fakes.scheduler.scheduler_bench import Bench, rows_of, tokens_of
from tests.fakes.scheduler.scheduler_worker import u32


def resumed(num_sent: int, **fields: object) -> Resumed:
    return Resumed(tokens_of(num_sent, 900), **fields)  # type: ignore[arg-type]


def test_it_computes_all_that_is_known_and_sends_what_follows_alone() -> None:
    bench = Bench()
    bench.submit("r", 6, max_new=5, resumed=resumed(3))
    (acquire,) = bench.ops(Acquire)
    assert acquire.tokens == tokens_of(6) + tokens_of(3, 900)
    bench.settle()
    (start,) = bench.plans[0].attach
    assert (u32(start.tokens), start.num_prompt_tokens) == (u32(acquire.tokens), 6)
    assert rows_of(bench.plans[0]) == {start.sequence_id: 9}
    bench.result({start.sequence_id: 7})
    bench.settle()
    bench.result({start.sequence_id: 8})
    assert bench.text("r") == [7, 8]
    last = bench.last("r")
    assert (last.finish, last.num_prompt_tokens, last.num_output_tokens) == (Finish.LENGTH, 6, 5)


@pytest.mark.parametrize(("known", "told"), [(4, 4), (None, 8)])
def test_what_was_cached_stays_what_its_first_grant_found(known: int | None, told: int) -> None:
    bench = Bench()
    bench.submit("r", 9, max_new=2, resumed=resumed(1, num_cached_tokens=known))
    bench.answer(cached_blocks=2)
    bench.settle()
    (start,) = bench.plans[0].attach
    bench.result({start.sequence_id: 7})
    assert bench.last("r").num_cached_tokens == told


def test_nothing_is_refused_for_want_of_room_that_was_taken_once() -> None:
    tight = TenantLimits(max_concurrency=1, max_queued=1, requests_per_minute=1, tokens_per_minute=10)
    bench = Bench(SchedulerSettings(instance=b"instance", max_queued=1, tenants={"t": tight}))
    assert bench.submit("first", 6) is None
    assert bench.submit("again", 6) is not None, "there is no room"
    for place in range(3):
        assert bench.submit(f"r{place}", 6, resumed=resumed(0)) is None
    bench.core.drain()
    assert bench.submit("late", 6, resumed=resumed(0)) is None
    assert bench.submit("new", 6) is not None


def test_a_call_is_open_again_before_its_steps_are() -> None:
    tight = TenantLimits(max_concurrency=1, max_queued=1)
    bench = Bench(SchedulerSettings(instance=b"instance", tenants={"t": tight}))
    assert bench.submit("call", 6, num_places=2, resumed=resumed(0)) is None
    assert bench.submit("step", 6, step_of="call", resumed=resumed(0)) is None
    refused = bench.submit("lost", 6, step_of="other", resumed=resumed(0))
    assert refused is not None
    assert refused.reason is RefusedReason.CALL_ENDED


def test_retries_go_on_from_the_moves_before() -> None:
    bench = Bench(SchedulerSettings(instance=b"instance", max_retries=2))
    bench.submit("r", 6, resumed=resumed(1, num_moves=2))
    bench.settle()
    bench.core.worker_lost(bench.plans[0] and next(iter(bench.core._life.workers)), bench.now_ns)
    bench.core.worker_gone(next(iter(bench.core._life.workers)), bench.now_ns)
    bench.advance()
    error = bench.last("r").error
    assert error is not None
    assert error.code is OutputErrorCode.WORKER_LOST


@pytest.mark.parametrize(
    "impossible",
    [
        Resumed(b"123"),
        Resumed(tokens_of(4, 900)),  # as many as are wanted in all
        Resumed(tokens_of(1, 900), num_logprob_positions=9),
        Resumed(b"", num_moves=0),
    ],
)
def test_what_cannot_be_is_refused(impossible: Resumed) -> None:
    bench = Bench()
    refused = bench.submit("r", 6, max_new=4, resumed=impossible)
    assert refused is not None
    assert refused.reason is RefusedReason.INTERNAL
    assert "resumed" in refused.message


def test_one_that_has_output_copies_from_nobody() -> None:
    bench = Bench()
    bench.submit("leader", 6, sampling=SamplingParams())
    bench.submit("fork", 6, fork_of="leader", resumed=resumed(1))
    assert len(bench.ops(Acquire)) == 2, "it does not wait for the prompt"
