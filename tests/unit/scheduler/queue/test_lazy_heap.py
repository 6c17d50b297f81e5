"""Heaps of the queue: the least that counts comes first, and what counts no more does not stay for ever."""

from __future__ import annotations

from random import Random

import pytest

from coppice_scheduler.core.queue.lazy_heap import SWEEP_MIN, LazyHeap
from coppice_scheduler.core.state.settings import SchedulerSettings
from tests.fakes.scheduler.scheduler_bench import MS, Bench


@pytest.mark.parametrize("seed", range(5))
def test_the_least_that_counts_comes_first_and_the_rest_is_swept(seed: int) -> None:
    random = Random(seed)
    counting: set[tuple[int, int]] = set()
    heap: LazyHeap[tuple[int, int]] = LazyHeap(lambda entry: entry in counting)
    most = 0
    for number in range(500):
        entry = (random.randrange(9), number)
        counting.add(entry)
        heap.push(entry)
        most = max(most, len(counting))
        if random.random() < 0.9:
            counting.discard(max(counting))
        if random.random() < 0.2:
            assert heap.first() == min(counting, default=None)
        assert set(heap) == counting
        assert len(heap) <= max(SWEEP_MIN, 2 * most)


def waiting_behind(**fields: object) -> Bench:
    """The only place is taken, and somebody stands first in line for it; nothing else comes to an end by itself."""
    bench = Bench(SchedulerSettings(instance=b"instance", max_running=1, max_step_tokens=64, match_window=0))
    bench.submit("runs", 1, max_new=50)
    bench.answer()
    bench.submit("first", 1, **fields)
    return bench


def entries(bench: Bench) -> int:
    life = bench.core._life
    lines = sum(len(line._by_age) + len(line._by_deadline) for line in life.queue._lines.values())
    return lines + len(life.deadlines._by_time)


def test_who_left_a_line_that_never_empties_is_forgotten() -> None:
    """Those of a low priority give up behind others; those with late deadlines end before an earlier one."""
    bench = waiting_behind(deadline_ns=1_000 * MS)
    for number in range(1_000):
        assert bench.submit(f"r{number}", 2, priority=1, deadline_ns=50_000 * MS) is None
        bench.cancel(f"r{number}")
    assert entries(bench) <= 3 * SWEEP_MIN + 3
