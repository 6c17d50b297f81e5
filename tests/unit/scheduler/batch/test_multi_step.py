"""Several decode steps in one plan: when, how many, and what becomes of tokens beyond an end."""

from __future__ import annotations

import pytest

from coppice.messages.index import Extend, NoCapacityReason
from coppice_scheduler.core.state.request import Finish
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import BLOCK, MS, Bench, rows_of
from tests.fakes.scheduler.scheduler_index import FakeIndex
from tests.fakes.scheduler.scheduler_worker import u32
from tests.fakes.scheduler.scheduler_world import World

SHORT_US = 1_000  # a step of this length fits `decode_burst_ms` ten times


def settings(**fields: object) -> SchedulerSettings:
    given = {"instance": b"instance", "max_running": 8, "max_step_tokens": 64, "max_steps_in_flight": 1}
    return SchedulerSettings(**{**given, **fields})  # type: ignore[arg-type]


def decoding(*most: int, step_us: int = SHORT_US, **fields: object) -> Bench:
    """Requests a, b, ... with prompts of 3 tokens that may get so many; all of them decode, and their worker has said
    how long a step takes."""
    bench = Bench(settings(**{"extend_ahead_blocks": 4, **fields}))
    bench.hold = True
    for name, count in zip("abcd", most, strict=False):
        bench.submit(name, 3, max_new=count)
    bench.advance()
    bench.hold = False
    everybody = dict.fromkeys(range(1, len(most) + 1), 9)
    bench.settle()
    bench.result(everybody)
    bench.settle()
    while bench.plans[0].num_decode_steps == 1:
        bench.result(everybody if bench.plans[0].rows or bench.plans[0].repeat_rows else {}, duration_us=step_us)
        bench.settle()
        if len(bench.text("a")) > 3:
            break
    return bench


def steps(bench: Bench) -> int:
    return bench.plans[0].num_decode_steps


def test_as_many_steps_as_fit_the_time() -> None:
    assert steps(decoding(40)) == 8, "max_decode_steps"
    assert steps(decoding(40, step_us=2_500)) == 4
    assert steps(decoding(40, step_us=11_000)) == 1
    assert steps(decoding(40, max_decode_steps=1)) == 1
    assert steps(decoding(40, max_decode_steps=3)) == 3


def test_nobody_knows_the_time_of_a_step_that_has_not_been() -> None:
    assert steps(decoding(40, step_us=0)) == 1


def test_all_tokens_leave_in_order() -> None:
    bench = decoding(40, 40)
    before = {name: bench.text(name) for name in "ab"}
    bench.result({1: list(range(20, 28)), 2: list(range(30, 38))}, duration_us=8 * SHORT_US)
    assert bench.text("a") == before["a"] + list(range(20, 28))
    assert bench.text("b") == before["b"] + list(range(30, 38))
    assert bench.core.stats().total_sampled_tokens == len(bench.text("a") + bench.text("b"))


def test_what_was_computed_after_a_stop_token_is_dropped() -> None:
    bench = Bench(settings(extend_ahead_blocks=4))
    bench.submit("r", 3, max_new=40, stop_token_ids=frozenset({7}))
    bench.settle()
    while steps(bench) == 1:
        bench.result({1: 9} if u32(bench.plans[0].rows) or bench.plans[0].repeat_rows else {}, duration_us=SHORT_US)
        bench.settle()
    before = bench.text("r")
    bench.result({1: [1, 2, 7, 4, 5, 7, 3, 1]})
    last = bench.last("r")
    assert (bench.text("r"), last.finish, last.stop_token) == ([*before, 1, 2], Finish.STOP, b"\7\0\0\0")
    assert last.num_output_tokens == len(before) + 3
    lease = bench.core._life.leases.leases
    assert all(found.num_full_blocks * BLOCK <= 3 + len(before) + 2 for found in lease.values()), "of known tokens only"


def test_no_more_than_the_shortest_has_left() -> None:
    bench = decoding(40, 7)
    while "b" in bench.core._life.requests:
        left = 7 - bench.core._life.requests["b"].num_output_tokens
        assert steps(bench) <= left
        bench.result({1: 9, 2: 9}, duration_us=SHORT_US)
        bench.settle()
    assert len(bench.text("b")) == 7


def test_no_step_without_a_block() -> None:
    """Even where no block is ever granted ahead."""
    bench = Bench(settings(extend_ahead_blocks=0))
    bench.submit("r", 3, max_new=40)
    bench.settle()
    most = 0
    for _ in range(30):
        if not bench.plans:
            break
        life = bench.core._life
        sequence = life.requests["r"].sequence if "r" in life.requests else None
        assert sequence is None or sequence.num_planned <= sequence.lease.reserved_tokens
        most = max(most, steps(bench))
        computes = bench.plans[0].rows or bench.plans[0].repeat_rows
        bench.result({1: 9} if computes else {}, duration_us=SHORT_US)
        bench.settle()
    assert 1 < most <= BLOCK


def test_blocks_are_asked_for_in_time() -> None:
    """With one block of 4 ahead plans of 7 steps would not fit: what is owned ahead grows with the plans."""
    bench = decoding(80, extend_ahead_blocks=1, max_decode_steps=7)
    seen = []
    for _ in range(6):
        seen.append(steps(bench))
        computes = bench.plans[0].rows or bench.plans[0].repeat_rows
        bench.result({1: 9} if computes else {}, duration_us=seen[-1] * SHORT_US)
        bench.settle()
    assert seen[1:] == [7] * 5


@pytest.mark.parametrize("trouble", ["waiting", "prefill", "closing", "stalled"])
def test_one_step_while_something_could_use_the_next_plan(trouble: str) -> None:
    bench = decoding(60, 60, 60)
    assert steps(bench) > 1
    if trouble == "waiting":
        bench.submit("new", 5)
        bench.result({1: 9, 2: 9, 3: 9}, duration_us=SHORT_US)
        assert bench.core.stats().waiting == 1
    elif trouble == "prefill":
        bench.submit("new", 5)
        bench.answer()
        bench.result({1: 9, 2: 9, 3: 9}, duration_us=SHORT_US)
        assert rows_of(bench.plans[0])[4] == 5
    elif trouble == "closing":
        bench.cancel("c")
        bench.result({1: 9, 2: 9, 3: 9}, duration_us=SHORT_US)
        assert u32(bench.plans[0].detach) == [3]
    else:
        bench = Bench(settings(extend_ahead_blocks=0))
        for name in "ab":
            bench.submit(name, 3, max_new=20)
        bench.settle()
        while not bench.ops(Extend):
            bench.result(dict.fromkeys(u32(bench.plans[0].rows) or [1, 2], 9), duration_us=SHORT_US)
        op, *rest = bench.batches[0]
        bench.answer_with(
            bench.no(op, NoCapacityReason.NO_WORKER),
            *(bench.yes(other) for other in rest),
        )
    assert all(plan.num_decode_steps == 1 for plan in bench.plans)


@pytest.mark.parametrize("seed", range(6))
def test_bursts_give_the_tokens_of_single_steps(seed: int) -> None:
    """Every token is checked against the reference by the world; here, that bursts took part."""
    world = World(settings(max_steps_in_flight=2), FakeIndex(4), seed)
    world.step_us = 1_000
    world.add_worker("a", 60)
    world.attach_index()
    for number in range(3):
        world.submit(f"r{number}", [seed, number, 1], 30, seed=number, stops=frozenset({7}))
    world.run()
    assert world.core.is_idle()
    assert max(worker.most_steps for worker in world.workers.values()) > 1
    for outcome in world.outcomes.values():
        assert outcome.tokens == outcome.expected()[0]


def in_flight(bench: Bench) -> int:
    return bench.core.stats().steps_in_flight


def test_a_plan_is_sent_ahead_shortly_before_the_one_at_work_ends() -> None:
    bench = Bench(settings(max_steps_in_flight=2, max_decode_steps=1))
    bench.submit("a", 3, max_new=40)
    bench.settle()
    assert in_flight(bench) == 2, "nobody knows how long a step takes"
    for _ in range(3):
        bench.result({1: 9}, duration_us=40_000)
        bench.settle()
    assert in_flight(bench) == 1
    due_ns = bench.core.next_wakeup_ns()
    assert due_ns == bench.now_ns + 30 * MS, "40 ms without the longest lead of 10"
    bench.now_ns = due_ns - 1
    bench.advance()
    assert in_flight(bench) == 1
    bench.now_ns = due_ns
    bench.advance()
    assert in_flight(bench) == 2


def test_a_step_that_ends_early_is_followed_at_once() -> None:
    bench = Bench(settings(max_steps_in_flight=2, max_decode_steps=1))
    bench.submit("a", 3, max_new=40)
    bench.settle()
    for turn in range(6):
        bench.result({1: 9}, duration_us=40_000)
        bench.settle()
        assert turn < 2 or in_flight(bench) == 1, "the one that left with the result"


def test_short_steps_are_always_planned_ahead() -> None:
    bench = Bench(settings(max_steps_in_flight=2, max_decode_steps=1))
    bench.submit("a", 3, max_new=40)
    bench.settle()
    for _ in range(4):
        bench.result({1: 9}, duration_us=2_900)
        bench.settle()
        assert in_flight(bench) == 2


def reserves(more: int) -> list[int]:
    """Positions that each Extend of the first 36 tokens asks blocks for; the cache service has none beyond 40."""
    bench = Bench(settings(max_decode_steps=1, extend_more_blocks=more))
    bench.submit("a", 3, max_new=60)
    asked = []
    for _ in range(36):
        while bench.batches:
            extends = [op for op in bench.batches[0] if isinstance(op, Extend)]
            asked += [op.reserve_tokens for op in extends]
            if any(op.reserve_tokens > 40 for op in extends):
                bench.answer_with(*(bench.no(op, NoCapacityReason.POOL_FULL) for op in bench.batches[0]))
            else:
                bench.answer()
        bench.result({1: 9} if bench.plans[0].rows or bench.plans[0].repeat_rows else {})
    return asked


def test_several_blocks_are_asked_for_at_once_until_they_are_refused() -> None:
    assert reserves(0)[:5] == [8, 9, 13, 17, 21], "each block by itself"
    assert reserves(3)[:4] == [20, 33, 49, 37], "after the refusal the need alone"
