"""Tokens and handles stay bytes or arrays from request to tree to plan to batch: the work in Python does not grow with
the number of tokens. Calls are counted, not timed, so the answer is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from tests.fakes.trio import Trio

BLOCK = 1024  # calls per block (grant, seal) must not look like calls per token


def count_lines(work: Callable[[], object]) -> int:
    """Lines of Python that `work` runs, and calls into C: a loop over tokens shows in the first, one in a generator
    expression too."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(previous)
    return count


def lines_to_serve(num_tokens: int) -> int:
    trio = Trio(num_blocks=128, block_size=BLOCK, max_context=65_536)
    tokens = np.random.default_rng(1).integers(0, 50_000, num_tokens, dtype=np.uint32).astype("<u4").tobytes()
    trio.serve(tokens, 2)  # the tree knows it now
    return count_lines(lambda: trio.serve(tokens, 2))


def test_the_path_of_a_request_does_not_loop_over_tokens() -> None:
    short, long = lines_to_serve(4_096), lines_to_serve(40_960)
    assert long - short < (40_960 - 4_096) / 8, f"{short} lines for 4,096 tokens, {long} for 40,960"


def test_a_cold_prompt_does_not_either() -> None:
    def lines(num_tokens: int) -> int:
        trio = Trio(num_blocks=128, block_size=BLOCK, max_context=65_536)
        tokens = np.arange(num_tokens, dtype="<u4").tobytes()
        return count_lines(lambda: trio.serve(tokens, 2))

    short, long = lines(4_096), lines(40_960)
    assert long - short < (40_960 - 4_096) / 8, f"{short} lines for 4,096 tokens, {long} for 40,960"
