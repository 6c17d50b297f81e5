"""How things are timed here: contenders take turns in one run, and the median of each counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter_ns

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
Operation = Callable[[int], object]


def time_in_turns(
    contenders: Mapping[str, Operation], rounds: int, turn: int = 16, clock: Callable[[], int] = perf_counter_ns
) -> dict[str, float]:
    """Median duration in µs, by a clock of ns, of each operation, called with 0, 1, 2 ... `rounds` times.

    Contenders take turns of `turn` calls, so that all of them meet the same noise and the same cold caches.
    """
    taken: dict[str, list[int]] = {name: [] for name in contenders}
    for start in range(0, rounds, turn):
        for name, operation in contenders.items():
            durations = taken[name]
            for number in range(start, min(start + turn, rounds)):
                began = clock()
                operation(number)
                durations.append(clock() - began)
    return {name: median(durations) / NS_PER_US for name, durations in taken.items() if durations}


def time_one(operation: Operation, rounds: int) -> float:
    """Median duration in µs."""
    return time_in_turns({"it": operation}, rounds)["it"]
