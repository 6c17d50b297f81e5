"""Which of a cell's planners serves a request: where it has the least left to compute, and the least ahead of it.

    cost = tokens of the prompt that are not cached there + tokens ahead of it on a worker of usual size there

Both are tokens to compute, so no weight and no threshold stands between them: a request leaves what it has cached
when the way there is longer by more than it would have to compute again. Dynamo's `DefaultWorkerSelector` counts so,
in blocks. SGLang's cache-aware router takes the longest match until loads differ by two thresholds, and the shortest
queue from there on; llm-d adds weighted scores between 0 and 1 of prefix and load. Both need numbers that fit one load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlannerLoad:
    """One planner of a cell, as the one that chooses knows it."""

    is_ready: bool
    num_blocks: int  # of all workers that it owns
    load_tokens: int  # of prompts, which wait or are not planned yet; with what was sent there since it last told
    num_workers: int = 1  # over which that load is spread


def choose(planners: Sequence[PlannerLoad], matched: Sequence[int], num_tokens: int) -> int:
    """The index of the planner that a prompt of `num_tokens` goes to.

    `matched[i]`: tokens of the prompt that are cached on the best worker of planner i. Of equal costs the least load
    for its blocks wins, then the first. One that is not ready, or has no blocks, is taken if all are so.
    """
    assert planners
    assert len(planners) == len(matched)
    able = [index for index, planner in enumerate(planners) if planner.is_ready and planner.num_blocks]
    indices = able or list(range(len(planners)))
    usual = _usual_blocks([planners[index] for index in indices])

    def key(index: int) -> tuple[float, float, int]:
        planner = planners[index]
        load_per_block = planner.load_tokens / max(planner.num_blocks, 1)
        return max(num_tokens - matched[index], 0) + load_per_block * usual, load_per_block, index

    return min(indices, key=key)


def _usual_blocks(planners: Sequence[PlannerLoad]) -> float:
    """Blocks of a worker, on the average."""
    num_workers = sum(planner.num_workers for planner in planners)
    return sum(planner.num_blocks for planner in planners) / max(num_workers, 1)
