"""What a worker measures of its own costs."""

from __future__ import annotations

from coppice.ids import TOKEN_BYTES, WorkerEpoch
from coppice.messages.registration import CopiesDone, Direction
from coppice.messages.step import StepResult
from coppice_worker.edge.copies.costs import NUM_UNUSUAL, MeasuredCosts

ANSWER = CopiesDone(WorkerEpoch(1), (7,), (8,))


def step(num_tokens: int, duration_us: int, num_sampled: int = 1) -> StepResult:
    sampled = bytes(TOKEN_BYTES * num_sampled)
    return StepResult(1, sampled, sampled, num_tokens=num_tokens, duration_us=duration_us)


def warm(costs: MeasuredCosts) -> None:
    for _ in range(NUM_UNUSUAL):
        costs.computed(step(100, 9_000))


def test_first_steps_and_copies_say_nothing() -> None:
    costs = MeasuredCosts()
    warm(costs)
    assert costs.added_to(ANSWER) == ANSWER
    costs.computed(step(100, 2_000))
    costs.copied(Direction.DEMOTE, 10, 90_000_000)
    for _ in range(NUM_UNUSUAL - 2):
        costs.copied(Direction.DEMOTE, 10, 900_000)
    assert costs.added_to(ANSWER) == CopiesDone(WorkerEpoch(1), (7,), (8,), 20_000), "of copies nothing"
    costs.copied(Direction.DEMOTE, 10, 400_000)
    assert costs.added_to(ANSWER) == CopiesDone(WorkerEpoch(1), (7,), (8,), 20_000, 40_000)


def test_tokens_count_by_their_number() -> None:
    costs = MeasuredCosts()
    warm(costs)
    for _ in range(40):
        costs.computed(step(16, 7_000, num_sampled=0))
        costs.computed(step(8_192, 163_840))
    assert 20_000 < costs.added_to(ANSWER).prefill_ns_per_token < 21_000


def test_tokens_follow_what_changes() -> None:
    costs = MeasuredCosts()
    warm(costs)
    costs.computed(step(100, 2_000))
    for _ in range(80):
        costs.computed(step(100, 4_000))
    assert 39_900 < costs.added_to(ANSWER).prefill_ns_per_token <= 40_000


def test_steps_that_mostly_decode_say_nothing() -> None:
    costs = MeasuredCosts()
    for _ in range(NUM_UNUSUAL + 2):
        costs.computed(step(64, 7_000, num_sampled=64))
        costs.computed(step(15, 7_000, num_sampled=0))
        costs.computed(step(64, 7_000, num_sampled=40))
    assert costs.added_to(ANSWER) == ANSWER


def test_copies_that_waited_for_steps_hardly_count() -> None:
    costs = MeasuredCosts()
    for _ in range(NUM_UNUSUAL):
        costs.copied(Direction.DEMOTE, 256, 256 * 40_000)
    for _ in range(5):
        costs.copied(Direction.DEMOTE, 8, 100_000_000)
    assert costs.added_to(ANSWER).copy_ns_per_block < 45_000
    for _ in range(500):
        costs.copied(Direction.DEMOTE, 8, 1_000_000)
    assert costs.added_to(ANSWER).copy_ns_per_block == 125_000, "slower for good"
    costs.copied(Direction.DEMOTE, 100, 4_000_000)
    assert costs.added_to(ANSWER).copy_ns_per_block == 40_000


def test_a_change_of_what_a_token_costs_is_news_once() -> None:
    costs, told = MeasuredCosts(), []

    def tell() -> None:
        told.append(costs.added_to(ANSWER).prefill_ns_per_token)

    costs.on_news = tell
    warm(costs)
    assert told == []
    for _ in range(9):
        costs.computed(step(100, 2_000))
    assert told == [20_000]
    for _ in range(60):
        costs.computed(step(100, 6_000))
    assert told[0] * 2 < told[-1] <= 60_000
    assert len(told) < 9


def test_what_is_too_much_for_the_message_is_cut() -> None:
    costs = MeasuredCosts()
    for _ in range(NUM_UNUSUAL):
        costs.copied(Direction.DEMOTE, 1, 1 << 40)
    assert costs.added_to(ANSWER).copy_ns_per_block == (1 << 32) - 1


def copied(costs: MeasuredCosts, direction: Direction, block_ns: int, times: int = 1) -> int:
    """What a block of the disk costs after that."""
    for _ in range(times):
        costs.copied(direction, 10, 10 * block_ns)
    return costs.added_to(ANSWER).disk_ns_per_block


def test_what_a_disk_costs_is_what_loads_take_once_there_were_some() -> None:
    costs = MeasuredCosts()
    assert copied(costs, Direction.STORE, 900_000, NUM_UNUSUAL - 1) == 0
    assert copied(costs, Direction.STORE, 900_000) == 900_000
    assert copied(costs, Direction.LOAD, 7_000_000) == 900_000, "it opened a folder that was never read"
    assert copied(costs, Direction.LOAD, 200_000, NUM_UNUSUAL - 1) == 200_000
    assert copied(costs, Direction.LOAD, 900_000) == 204_000, "it may have been one time"
    assert costs.added_to(ANSWER).copy_ns_per_block == 0
