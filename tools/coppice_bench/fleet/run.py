"""`coppice bench fleet`: how large a cell may be; which of its two services is full first.

Real cores of one scheduler and one cache service, full workers that compute nothing, virtual time (`world.py`). Of each
number of workers:

    scheduler_us_per_step, cache_us_per_step    processor time of the cores for a step of one worker
    scheduler_us_per_request, cache_...         the same for a request, from its submission to its end
    scheduler_load, cache_load                  processor seconds for a second in which all workers compute
    requests_per_s                              that end in such a second
    mib                                         resident memory that the cores took, by this process
    full_first, requests_per_s_at_full          the busier of the two, and how many requests end when it is full

Sockets, codecs and front doors are not in it; `coppice bench plan` says what they add to a step.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from time import thread_time_ns
from typing import Any

from coppice_bench.fleet.world import (
    BLOCK,
    NUM_BLOCKS,
    OUTPUT_TOKENS,
    OWN_TOKENS,
    ROWS,
    SHARED_TOKENS,
    STEP_NS,
    FleetWorld,
)
from coppice_bench.index.memory import resident_bytes
from coppice_bench.report import describe_run, note

SIZES = (8, 64, 512)
_QUICK_SIZES = (1, 2)
_STEPS = 20_000  # of all workers together
_QUICK_STEPS = 100
_MIB = 1 << 20


def run_fleet(*, quick: bool, sizes: Sequence[int] = ()) -> dict[str, Any]:
    """`sizes`: numbers of workers."""
    steps = _QUICK_STEPS if quick else _STEPS
    return {
        "bench": "fleet",
        "fleets": {size: _measured(size, steps) for size in sizes or (_QUICK_SIZES if quick else SIZES)},
        "settings": {
            "rows": ROWS,
            "step_ms": STEP_NS / 1e6,
            "blocks": NUM_BLOCKS,
            "block_size": BLOCK,
            "shared_tokens": SHARED_TOKENS,
            "own_tokens": OWN_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
        },
        **describe_run(),
    }


def _measured(size: int, steps: int) -> dict[str, Any]:
    gc.collect()
    before = resident_bytes()
    note(f"{size} workers: warms up")
    world = FleetWorld(size, thread_time_ns)
    world.warm_up()
    note(f"{size} workers: measures {steps} steps")
    began_s = world.now_s
    while world.spent.steps < steps:
        world.turn()
    spent, virtual_s = world.spent, world.now_s - began_s
    loads = {"scheduler": spent.scheduler_ns / 1e9 / virtual_s, "cache": spent.cache_ns / 1e9 / virtual_s}
    full_first = max(loads, key=lambda name: loads[name])
    requests_per_s = spent.ended / virtual_s
    return {
        "scheduler_us_per_step": spent.scheduler_ns / 1e3 / spent.steps,
        "cache_us_per_step": spent.cache_ns / 1e3 / spent.steps,
        "scheduler_us_per_request": spent.scheduler_ns / 1e3 / max(1, spent.ended),
        "cache_us_per_request": spent.cache_ns / 1e3 / max(1, spent.ended),
        "scheduler_load": loads["scheduler"],
        "cache_load": loads["cache"],
        "requests_per_s": requests_per_s,
        "tokens_per_s": spent.tokens / virtual_s,
        "mib": (resident_bytes() - before) / _MIB,
        "full_first": full_first,
        "requests_per_s_at_full": requests_per_s / loads[full_first],
    }
