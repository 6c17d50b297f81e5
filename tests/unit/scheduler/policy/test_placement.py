"""Which planner of a cell serves a request: least left to compute and least ahead, and what decides between equals."""

from __future__ import annotations

import pytest

from coppice_scheduler.core.policy.placement import PlannerLoad, choose

IDLE = PlannerLoad(True, 100, 0)


def loaded(load_tokens: int, num_blocks: int = 100, num_workers: int = 1) -> PlannerLoad:
    return PlannerLoad(True, num_blocks, load_tokens, num_workers)


def test_the_longest_match_wins_among_idle_planners() -> None:
    assert choose([IDLE, IDLE, IDLE], [0, 64, 32], 100) == 1


def test_a_cold_prompt_goes_where_the_least_load_is_for_the_blocks() -> None:
    assert choose([loaded(900), loaded(400), loaded(600)], [0, 0, 0], 100) == 1
    assert choose([loaded(900, 400), loaded(400, 100)], [0, 0], 100) == 0


@pytest.mark.parametrize(("load", "chosen"), [(63, 0), (65, 1)])
def test_what_is_cached_is_left_when_the_way_there_is_longer_than_computing_it(load: int, chosen: int) -> None:
    assert choose([loaded(load), IDLE], [64, 0], 100) == chosen


def test_load_is_spread_over_the_workers_of_a_planner() -> None:
    """500 tokens ahead of each of ten workers are 50 on the worker that is chosen."""
    assert choose([loaded(500, 1000, 10), loaded(0, 1000, 10)], [64, 0], 100) == 0
    assert choose([loaded(700, 1000, 10), loaded(0, 1000, 10)], [64, 0], 100) == 1


def test_of_equal_costs_the_least_load_for_its_blocks_wins_then_the_first() -> None:
    assert choose([loaded(64), IDLE], [64, 0], 100) == 1
    assert choose([loaded(64), loaded(64)], [0, 0], 100) == 0
    assert choose([loaded(128, 200), loaded(64, 100)], [0, 0], 100) == 0


def test_one_that_is_not_ready_or_owns_nothing_is_taken_if_all_are_so() -> None:
    away, empty = PlannerLoad(False, 100, 0), PlannerLoad(True, 0, 0, 0)
    assert choose([away, empty, loaded(10_000)], [100, 100, 0], 100) == 2
    assert choose([away, PlannerLoad(False, 100, 0)], [0, 50], 100) == 1
    assert choose([empty, PlannerLoad(True, 0, 30, 0)], [0, 0], 100) == 0


def test_a_match_longer_than_the_prompt_counts_as_the_whole_prompt() -> None:
    assert choose([loaded(1), IDLE], [128, 100], 100) == 1


def test_one_planner_is_chosen_whatever_it_says() -> None:
    assert choose([PlannerLoad(False, 0, 10, 0)], [0], 1) == 0
    with pytest.raises(AssertionError):
        choose([], [], 1)
