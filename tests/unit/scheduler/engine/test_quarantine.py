"""A prompt with which two workers were lost is not placed again for a while."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from coppice.ids import WorkerEpoch
from coppice.messages.index import Acquire
from coppice_scheduler.core.queue.quarantine import PROMPTS_MAX, InWork, Quarantine
from coppice_scheduler.core.state.request import Finish, OutputErrorCode, RefusedReason, Request
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import MS, Bench, W

QUARANTINE_MS = 1_000


class Dying(Bench):
    """A worker that dies when a test says so, and comes back under its next epoch."""

    def __init__(self, **fields: object) -> None:
        given = {"max_running": 8, "max_step_tokens": 64, "quarantine_ms": QUARANTINE_MS, **fields}
        super().__init__(SchedulerSettings(instance=b"instance", **given))  # type: ignore[arg-type]
        self.epoch = 1

    def die(self) -> None:
        self.epoch += 1
        self.plans.clear()
        self.core.worker_attached(W, WorkerEpoch(self.epoch), True, self.now_ns)
        self.list_workers(self.epoch)
        self.advance()
        self.run()

    def run(self) -> None:
        """Say yes to all that is asked: whoever waits is planned."""
        while self.batches:
            self.answer_with(*(self.yes(op, epoch=self.epoch) for op in self.batches[0]))

    def kill_with(self, name: str, num_tokens: int, **fields: object) -> None:
        """One request, alone, and the death of its worker."""
        assert self.submit(name, num_tokens, **fields) is None  # type: ignore[arg-type]
        self.run()
        assert self.plans
        self.die()

    def complete(self, name: str) -> None:
        while self.plans:
            self.result(dict.fromkeys(range(1, 40), 7))
            self.run()
        assert self.last(name).finish is Finish.LENGTH


def code_of(bench: Bench, name: str) -> OutputErrorCode | None:
    error = bench.last(name).error
    return error.code if error is not None else None


def test_a_request_that_two_workers_were_lost_with_ends_and_says_for_how_long() -> None:
    bench = Dying(max_retries=5)
    bench.kill_with("r", 3)
    assert bench.plans, "the first time it starts over"
    bench.now_ns += 10 * MS
    bench.die()
    error = bench.last("r").error
    assert error is not None
    assert (error.code, error.retry_after_ms) == (OutputErrorCode.QUARANTINED, QUARANTINE_MS)
    assert not bench.ops(Acquire)
    assert not bench.plans or not bench.plans[-1].attach


def test_the_same_prompt_is_refused_until_its_time_is_over() -> None:
    bench = Dying(max_retries=0)
    bench.kill_with("first", 3)
    assert code_of(bench, "first") is OutputErrorCode.WORKER_LOST
    bench.kill_with("again", 3)
    assert code_of(bench, "again") is OutputErrorCode.QUARANTINED
    bench.now_ns += 400 * MS
    refused = bench.submit("more", 3)
    assert refused is not None
    assert (refused.reason, refused.retry_after_ms) == (RefusedReason.QUARANTINED, QUARANTINE_MS - 400)
    assert bench.submit("another prompt", 4) is None
    assert bench.submit("another tenant", 3, tenant="u") is None
    bench.now_ns += 600 * MS
    assert bench.submit("later", 3) is None


def test_losses_far_apart_are_not_counted_together() -> None:
    bench = Dying(max_retries=0)
    bench.kill_with("first", 3)
    bench.now_ns += QUARANTINE_MS * MS
    bench.kill_with("again", 3)
    assert code_of(bench, "again") is OutputErrorCode.WORKER_LOST
    assert bench.submit("more", 3) is None


def test_who_completes_is_suspected_no_more() -> None:
    bench = Dying()
    bench.kill_with("r", 3, max_new=2)
    bench.complete("r")
    bench.kill_with("s", 3, max_new=2)
    assert bench.plans, "it starts over"
    bench.complete("s")


def test_who_passes_the_place_where_it_was_lost_is_suspected_no_more() -> None:
    """Two plans with a token each were on their way: behind two tokens nothing is left that it could have died of."""
    for num_more, is_cleared in ((1, False), (2, True)):
        bench = Dying(max_decode_steps=1)
        bench.kill_with("r", 3, max_new=9)
        assert len(bench.plans) == 2
        for _ in range(num_more):
            bench.result({2: 7})
        bench.die()
        ended = [output for output in bench.outputs if output.finish is not None]
        assert bool(ended) != is_cleared
        assert is_cleared or code_of(bench, "r") is OutputErrorCode.QUARANTINED


def test_a_worker_that_is_gone_and_then_dead_was_lost_once() -> None:
    bench = Dying(max_retries=5)
    bench.submit("r", 3)
    bench.run()
    bench.core.worker_lost(W, 0)
    bench.core.worker_gone(W, 0)
    bench.advance()
    bench.die()
    assert bench.submit("more", 3) is None
    bench.core.worker_lost(W, 0)
    bench.core.worker_gone(W, 0)
    bench.advance()
    assert code_of(bench, "r") is OutputErrorCode.QUARANTINED, "it is known before any epoch is over"
    assert code_of(bench, "more") is OutputErrorCode.QUARANTINED


def test_what_waits_with_the_same_prompt_is_not_the_next_to_kill() -> None:
    bench = Dying(max_retries=0, max_running=1)
    bench.kill_with("first", 3)
    bench.submit("again", 3)
    bench.run()
    bench.submit("waits", 3)
    bench.submit("innocent", 4)
    bench.die()
    assert code_of(bench, "again") is OutputErrorCode.QUARANTINED
    assert code_of(bench, "waits") is OutputErrorCode.QUARANTINED
    assert not [output for output in bench.outputs if output.request_id == "innocent"]
    assert bench.plans, "it runs"


def test_who_hangs_up_does_not_get_away() -> None:
    bench = Dying(max_retries=0)
    for name in ("first", "again"):
        bench.submit(name, 3)
        bench.run()
        bench.cancel(name)
        bench.die()
    refused = bench.submit("more", 3)
    assert refused is not None
    assert refused.reason is RefusedReason.QUARANTINED


def test_who_was_in_no_plan_is_not_suspected() -> None:
    """It had a place on the worker, which was not told of it yet."""
    bench = Dying(max_retries=0, max_steps_in_flight=1)
    for name in ("first", "again"):
        for num_tokens in (4, 3):
            assert bench.submit(f"{name} {num_tokens}", num_tokens) is None
            bench.run()
        assert [len(plan.attach) for plan in bench.plans] == [1]
        assert bench.core.stats().running == 2
        bench.die()
    assert code_of(bench, "again 4") is OutputErrorCode.QUARANTINED
    assert code_of(bench, "again 3") is OutputErrorCode.WORKER_LOST
    assert bench.submit("more", 3) is None


def test_several_answers_of_one_prompt_are_one_loss() -> None:
    bench = Dying(max_retries=5)
    bench.hold = True
    bench.submit("r", 3)
    bench.submit("copy", 3)
    bench.advance()
    bench.run()
    assert len(bench.plans[0].attach) == 2
    bench.die()
    assert not [output for output in bench.outputs if output.finish]
    assert bench.submit("more", 3) is None


def test_it_can_be_switched_off() -> None:
    bench = Dying(max_retries=0, quarantine_ms=0)
    for name in "abc":
        bench.kill_with(name, 3)
        assert code_of(bench, name) is OutputErrorCode.WORKER_LOST


def test_the_table_is_bounded_and_forgets_the_oldest() -> None:
    bench = Bench()
    bench.submit("r", 3)
    example = bench.core._life.requests["r"].request
    quarantine = Quarantine(QUARANTINE_MS)

    def prompt(number: int) -> Request:
        return replace(example, tokens=number.to_bytes(4, "little"))

    for _ in range(2):
        quarantine.lost([InWork(prompt(0), 1, 2)], 0)
    assert quarantine.left_ms(prompt(0), 0)
    quarantine.lost([InWork(prompt(number), 1, 2) for number in range(1, PROMPTS_MAX + 1)], 1)
    assert len(quarantine) == PROMPTS_MAX
    assert not quarantine.left_ms(prompt(0), 1)
    assert not quarantine.left_ms(prompt(1), QUARANTINE_MS * MS + 1)
    assert not len(quarantine), "what is over is dropped"


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH, Finish.CANCELLED])
def test_only_an_answer_clears_a_prompt(finish: Finish) -> None:
    bench = Dying(max_retries=0)
    bench.kill_with("first", 3)
    bench.submit("second", 3)
    bench.core.cancel("second", bench.now_ns, finish)
    bench.advance()
    bench.run()
    bench.kill_with("third", 3)
    cleared = finish is not Finish.CANCELLED
    assert (code_of(bench, "third") is OutputErrorCode.WORKER_LOST) == cleared
