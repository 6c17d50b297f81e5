"""A worker cannot follow a grammar, or not yet: the request ends, or comes again until it can."""

from __future__ import annotations

import pytest

from coppice.ids import LeaseId, SequenceId, WorkerId
from coppice.messages.index import Acquire, Release
from coppice.messages.step import Refusal, RefusalCode, SamplingParams
from coppice_scheduler.core.state.request import Finish, OutputErrorCode
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import BLOCK, Bench
from tests.fakes.scheduler.scheduler_index import FakeIndex
from tests.fakes.scheduler.scheduler_worker import u32
from tests.fakes.scheduler.scheduler_world import World

NUM_TIMES = 5  # more than any request is retried
GRAMMAR = SamplingParams(temperature=0.0, grammar="start: /a+/")


def settings(**fields: object) -> SchedulerSettings:
    return SchedulerSettings(**{"instance": b"instance", "max_running": 8, "max_step_tokens": 64, **fields})  # type: ignore[arg-type]


def lease(number: int) -> LeaseId:
    return LeaseId(b"instance" + number.to_bytes(8, "little"))


def running(max_retries: int = 1) -> Bench:
    """Request "r" is attached as sequence 1."""
    bench = Bench(settings(max_retries=max_retries, extend_more_blocks=0))
    bench.submit("r", 3, max_new=9, sampling=GRAMMAR)
    bench.settle()
    return bench


def refuse(bench: Bench, code: RefusalCode, number: int, sampled: dict[int, int] | None = None) -> None:
    bench.result(sampled, refusals=(Refusal(SequenceId(number), code, 0),))


def ends_of(bench: Bench, name: str) -> list[OutputErrorCode | None]:
    ended = [output for output in bench.outputs if output.request_id == name and output.finish is not None]
    return [output.error.code if output.error else None for output in ended]


def test_the_worker_is_told_whose_grammar_it_is() -> None:
    bench = Bench(settings(extend_more_blocks=0))
    bench.submit("plain", 3, max_new=9)
    bench.submit("guided", 3, max_new=9, sampling=GRAMMAR)
    bench.settle()
    begun = [start for plan in bench.plans for start in plan.attach]
    assert sorted(start.request_id for start in begun) == ["", "guided"], "what logs nothing has none"


# --- it cannot be followed


@pytest.mark.parametrize("seen", [0, 1, 3])
def test_a_grammar_that_cannot_be_followed_ends_its_request_at_once(seen: int) -> None:
    bench = running()
    for token in range(seen):
        bench.result({1: token})
    refuse(bench, RefusalCode.GRAMMAR, 1)
    assert ends_of(bench, "r") == [OutputErrorCode.GRAMMAR]
    last = bench.last("r")
    assert last.finish is Finish.ERROR
    assert last.error is not None
    assert "grammar" in last.error.message
    assert last.error.retry_after_ms == 0, "it would be so again"
    assert bench.text("r") == list(range(seen))
    bench.settle()
    stats = bench.core.stats()
    assert (stats.total_retries, stats.running, stats.waiting, stats.total_finished) == (0, 0, 0, 1)
    assert not bench.ops(Acquire)


def test_its_sequence_is_detached_and_its_lease_released() -> None:
    bench = running()
    bench.result({1: 5})
    refuse(bench, RefusalCode.GRAMMAR, 1)
    while bench.plans and not bench.plans[0].detach:
        refuse(bench, RefusalCode.GRAMMAR, 1)  # of plans that were on their way
    assert u32(bench.plans[0].detach) == [1]
    assert not bench.ops(Release)
    bench.result()
    assert [op.lease_id for op in bench.ops(Release)] == [lease(1)]
    assert ends_of(bench, "r") == [OutputErrorCode.GRAMMAR]


def test_its_mates_get_their_tokens() -> None:
    bench = Bench(settings(max_steps_in_flight=1))
    bench.submit("r", 3, max_new=9, sampling=GRAMMAR)
    bench.submit("mate", 5, max_new=2)
    bench.settle()
    while not any(rows for rows in [u32(plan.rows) for plan in bench.plans] if 2 in rows):
        bench.result({1: 4})
    refuse(bench, RefusalCode.GRAMMAR, 1, {2: 6})
    bench.settle()
    while not ends_of(bench, "mate"):
        bench.result({2: 7})
    assert bench.text("mate") == [6, 7]
    assert ends_of(bench, "mate") == [None]
    assert ends_of(bench, "r") == [OutputErrorCode.GRAMMAR]


# --- it is not compiled yet


def test_a_request_comes_again_until_its_grammar_is_compiled_and_no_retry_is_counted() -> None:
    bench = running(max_retries=0)
    for number in range(1, 1 + NUM_TIMES):
        refuse(bench, RefusalCode.GRAMMAR_PENDING, number)
        assert not ends_of(bench, "r")
        assert [op.lease_id for op in bench.ops(Acquire)] == [lease(number + 1)]
        bench.settle()
        while not bench.plans[0].attach:
            refuse(bench, RefusalCode.GRAMMAR_PENDING, number)  # of plans that were on their way
        assert [start.sequence_id for start in bench.plans[0].attach] == [number + 1]
        assert bench.plans[0].attach[0].sampling == GRAMMAR
    last = 1 + NUM_TIMES
    while not ends_of(bench, "r"):
        bench.result({last: 5})
        bench.settle()
    assert bench.text("r") == [5] * 9
    assert ends_of(bench, "r") == [None]
    assert bench.core.stats().total_retries == 0


def test_what_it_said_before_is_said_once() -> None:
    """It moved, after a preemption for one, and the worker compiles its grammar anew."""
    bench = running(max_retries=0)
    for token in (5, 6):
        bench.result({1: token})
    refuse(bench, RefusalCode.GRAMMAR_PENDING, 1)
    bench.settle()
    while not bench.plans[0].attach:
        refuse(bench, RefusalCode.GRAMMAR_PENDING, 1)
    (start,) = bench.plans[0].attach
    assert u32(start.tokens)[-2:] == [5, 6]
    assert start.num_prompt_tokens == 3
    while not ends_of(bench, "r"):
        bench.result({2: 7})
        bench.settle()
    assert bench.text("r") == [5, 6] + [7] * 7
    assert bench.core.stats().total_retries == 0


def test_a_grammar_that_turns_out_bad_ends_the_request_that_waited_for_it() -> None:
    bench = running(max_retries=0)
    refuse(bench, RefusalCode.GRAMMAR_PENDING, 1)
    bench.settle()
    while not bench.plans[0].attach:
        refuse(bench, RefusalCode.GRAMMAR_PENDING, 1)
    refuse(bench, RefusalCode.GRAMMAR, 2)
    assert ends_of(bench, "r") == [OutputErrorCode.GRAMMAR]
    assert bench.core.stats().total_retries == 0


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 10])
def test_requests_whose_grammars_are_compiled_late_get_their_own_tokens(num_tokens: int) -> None:
    """World compares each token with the reference. Two requests share a prompt, so one may wait for the other's."""
    world = World(settings(max_retries=0, max_step_tokens=9), FakeIndex(BLOCK), seed=num_tokens)
    world.add_worker("a", 60)
    world.attach_index()
    worker = world.workers[WorkerId("a")]
    worker.refuse_next = [RefusalCode.GRAMMAR_PENDING] * NUM_TIMES
    for seed, name in enumerate(("r", "s")):
        world.submit(name, list(range(num_tokens)), 6, seed=seed)
    world.submit("fork", list(range(num_tokens)), 6, seed=2, fork_of="r")
    world.run()
    assert [world.finish_of(name) for name in ("r", "s", "fork")] == [Finish.LENGTH] * 3
    assert not worker.refuse_next, "all were refused"
    assert world.core.stats().total_retries == 0
