"""`coppice bench fleet`: how large a cell may be; which of its services is full first.

Real cores of one cache service and of one or several schedulers, full workers that compute nothing, virtual time
(`world.py`). Of each number of schedulers (planners) and of workers:

    scheduler_us_per_step, cache_us_per_step    processor time of the cores for a step of one worker; of all planners
    scheduler_us_per_request, cache_...         the same for a request, from its submission to its end
    match_us_per_request                        of cache_us_per_request, to say where what of a new prompt is cached
    scheduler_load, cache_load                  processor seconds for a second in which all workers compute; of
                                                planners the busiest
    planners                                    of each planner: its workers, its load, its requests' share
    requests_per_s                              that end in such a second
    utilisation                                 share of the workers' time in which they compute
    cached_share                                tokens of prompts that were found cached
    mib                                         resident memory that the cores took, by this process
    full_first, requests_per_s_at_full          the busier of the two, and how many requests end when it is full

`workers_at_full` is where the first one is full, between the sizes that were measured. Sockets, codecs and front doors
are not in it; `coppice bench plan` says what they add to a step.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from math import exp, log
from multiprocessing import get_context
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


def run_fleet(*, quick: bool, sizes: Sequence[int] = (), planners: Sequence[int] = ()) -> dict[str, Any]:
    """`sizes`: numbers of workers; `planners`: of schedulers. A cell of fewer workers than schedulers is left out.

    "fleets" has cells of one scheduler, "cells" those of more, by their number.
    """
    steps, measured = (_QUICK_STEPS, sizes or _QUICK_SIZES) if quick else (_STEPS, sizes or SIZES)
    measure = _measured if quick else _in_a_process
    cells = {
        number: {size: measure(size, number, steps) for size in measured if size >= number}
        for number in planners or (1,)
    }
    return {
        "bench": "fleet",
        "workers_at_full": {number: at_full(found) for number, found in cells.items()},
        "fleets": cells.pop(1, {}),
        **({"cells": cells} if cells else {}),
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


def _in_a_process(size: int, num_planners: int, steps: int) -> dict[str, Any]:
    """In one of its own, as memory that another cell has freed is not taken anew."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measured, size, num_planners, steps).result()


def _measured(size: int, num_planners: int, steps: int) -> dict[str, Any]:
    gc.collect()
    before = resident_bytes()
    name = f"{num_planners} schedulers, {size} workers"
    note(f"{name}: warms up")
    world = FleetWorld(size, num_planners, thread_time_ns)
    world.warm_up()
    note(f"{name}: measures {steps} steps")
    began_s = world.now_s
    while world.spent.steps < steps:
        world.turn()
    spent, virtual_s = world.spent, world.now_s - began_s
    cache_ns, planners_ns = spent.cache_ns + spent.match_ns, sum(planner.spent_ns for planner in world.planners)
    busiest_ns = max(planner.spent_ns for planner in world.planners)
    loads = {"scheduler": busiest_ns / 1e9 / virtual_s, "cache": cache_ns / 1e9 / virtual_s}
    full_first = max(loads, key=lambda name: loads[name])
    requests_per_s, num_ended = spent.ended / virtual_s, max(1, spent.ended)
    return {
        "scheduler_us_per_step": planners_ns / 1e3 / spent.steps,
        "cache_us_per_step": cache_ns / 1e3 / spent.steps,
        "scheduler_us_per_request": planners_ns / 1e3 / num_ended,
        "cache_us_per_request": cache_ns / 1e3 / num_ended,
        "match_us_per_request": spent.match_ns / 1e3 / num_ended,
        "scheduler_load": loads["scheduler"],
        "cache_load": loads["cache"],
        "planners": [
            {
                "workers": len(planner.owned),
                "load": planner.spent_ns / 1e9 / virtual_s,
                "requests_share": planner.ended / num_ended,
            }
            for planner in world.planners
        ],
        "requests_per_s": requests_per_s,
        "tokens_per_s": spent.tokens / virtual_s,
        "utilisation": spent.steps * STEP_NS / 1e9 / (virtual_s * size),
        "cached_share": world.cached_share,
        "mib": (resident_bytes() - before) / _MIB,
        "full_first": full_first,
        "requests_per_s_at_full": requests_per_s / loads[full_first],
    }


def at_full(found: Mapping[int, dict[str, Any]]) -> float | None:
    """Workers with which the first service is full, along the line through two sizes of which one is above and the
    other below, where both are drawn by their powers of ten. None: all are above, or below."""
    busiest = sorted((size, max(one["scheduler_load"], one["cache_load"])) for size, one in found.items())
    for (size, load), (next_size, next_load) in pairwise(busiest):
        if load <= 1 < next_load:
            part = -log(load) / (log(next_load) - log(load))
            return exp(log(size) + part * (log(next_size) - log(size)))
    return None
