"""What a worker measures of its own costs."""

from __future__ import annotations

from coppice.ids import TOKEN_BYTES, WorkerEpoch
from coppice.messages.registration import CopiesDone
from coppice.messages.step import StepResult
from coppice_worker.edge.costs import NUM_UNUSUAL, MeasuredCosts

ANSWER = CopiesDone(WorkerEpoch(1), (7,), (8,))


def step(num_tokens: int, duration_us: int, num_sampled: int = 1) -> StepResult:
    sampled = bytes(TOKEN_BYTES * num_sampled)
    return StepResult(1, sampled, sampled, num_tokens=num_tokens, duration_us=duration_us)


def test_nothing_is_said_before_enough_was_measured() -> None:
    costs = MeasuredCosts()
    for _ in range(NUM_UNUSUAL):
        costs.computed(step(100, 9_000))
        costs.copied(10, 9_000_000)
    assert costs.added_to(ANSWER) == ANSWER
    costs.computed(step(100, 2_000))
    costs.copied(10, 400_000)
    assert costs.added_to(ANSWER) == CopiesDone(WorkerEpoch(1), (7,), (8,), 20_000, 40_000)


def test_means_follow_what_changes() -> None:
    costs = MeasuredCosts()
    for _ in range(NUM_UNUSUAL + 1):
        costs.computed(step(100, 2_000))
    for _ in range(60):
        costs.computed(step(100, 4_000))
    assert 39_900 < costs.added_to(ANSWER).prefill_ns_per_token <= 40_000


def test_steps_that_mostly_decode_say_nothing() -> None:
    costs = MeasuredCosts()
    for _ in range(NUM_UNUSUAL + 2):
        costs.computed(step(64, 7_000, num_sampled=64))
        costs.computed(step(15, 7_000, num_sampled=0))
        costs.computed(step(64, 7_000, num_sampled=40))
    assert costs.added_to(ANSWER) == ANSWER
