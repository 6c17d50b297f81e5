"""How kernels are timed: contenders take turns, medians count. On CUDA from graphs, so that launches cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Protocol

import torch

from coppice_bench.timing import time_in_turns, time_one

Kernel = Callable[[], object]
_CALLS_PER_GRAPH = 10
_WARM_UPS = 3
_ROUNDS_MAX = 400
_US_PER_S = 1_000_000


class Clock(Protocol):
    """Times kernels of one device."""

    def times_us(self, contenders: Mapping[str, Kernel]) -> dict[str, float]:
        """Median time of one call of each, in µs."""


def clock_for(device: torch.device, rounds: int, budget_s: float = 0) -> Clock:
    """Of at least so many rounds; on a CPU of as many as the slowest contender does in `budget_s`."""
    return CudaClock(rounds) if device.type == "cuda" else HostClock(rounds, budget_s)


class HostClock:
    """Calls that compute before they return. Short ones are repeated for longer than a neighbour disturbs them."""

    def __init__(self, rounds: int, budget_s: float = 0) -> None:
        self._rounds, self._budget_us = rounds, budget_s * _US_PER_S

    def times_us(self, contenders: Mapping[str, Kernel]) -> dict[str, float]:
        operations = {name: lambda _, kernel=kernel: kernel() for name, kernel in contenders.items()}
        slowest_us = max(time_one(operation, _WARM_UPS) for operation in operations.values())
        rounds = max(self._rounds, min(_ROUNDS_MAX, int(self._budget_us / slowest_us)))
        return time_in_turns(operations, rounds, turn=4)


class CudaClock:
    """Calls that launch: a graph of several of them is replayed between two events."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def times_us(self, contenders: Mapping[str, Kernel]) -> dict[str, float]:
        replays = {name: _replay(kernel) for name, kernel in contenders.items()}
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(self._rounds):
            for name, (replay, num_calls) in replays.items():
                begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
                begin.record()
                replay()
                end.record()
                end.synchronize()
                taken[name].append(begin.elapsed_time(end) * 1000 / num_calls)
        return {name: median(times) for name, times in taken.items()}


def _replay(kernel: Kernel) -> tuple[Kernel, int]:
    """What to time, and how many calls it stands for. What cannot be captured is called as it is."""
    side = torch.Stream("cuda")
    side.wait_stream(torch.cuda.current_stream())
    with side:
        for _ in range(_WARM_UPS):
            kernel()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(_CALLS_PER_GRAPH):
                kernel()
    except RuntimeError:
        torch.cuda.synchronize()
        return lambda: [kernel() for _ in range(_CALLS_PER_GRAPH)], _CALLS_PER_GRAPH
    return graph.replay, _CALLS_PER_GRAPH
