"""How kernels are timed: contenders take turns, medians count. On CUDA from graphs, so that launches cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Protocol

import torch

from coppice_bench.timing import time_in_turns

Kernel = Callable[[], object]
_CALLS_PER_GRAPH = 10
_WARM_UPS = 3


class Clock(Protocol):
    """Times kernels of one device."""

    def times_us(self, contenders: Mapping[str, Kernel]) -> dict[str, float]:
        """Median time of one call of each, in µs."""


def clock_for(device: torch.device, rounds: int) -> Clock:
    return CudaClock(rounds) if device.type == "cuda" else HostClock(rounds)


class HostClock:
    """Calls that compute before they return."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds

    def times_us(self, contenders: Mapping[str, Kernel]) -> dict[str, float]:
        for kernel in contenders.values():
            for _ in range(_WARM_UPS):
                kernel()
        operations = {name: lambda _, kernel=kernel: kernel() for name, kernel in contenders.items()}
        return time_in_turns(operations, self._rounds, turn=4)


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
