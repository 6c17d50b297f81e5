"""`coppice bench plan`: what a step costs the scheduler's processor, by sequences that run.

    plan_ms       the planning core alone: it takes the worker's result, the answers of the cache service and new
                  requests, and says the next plan and the next ops
    step_cpu_ms   that, the plan to bytes, the result from bytes, and the front door's share: tokens to their streams,
                  each stream's to text

Steady decode: each request that ends is followed by a new one. Answers and results are made outside of the timing. The
numbers are medians of this thread's processor time, not of the clock. Settings are the service's own, but for one step
per plan and ceilings that let so many run; the report says which.
"""

from __future__ import annotations

from importlib import resources
from statistics import median
from time import thread_time_ns
from typing import Any

from tokenizers import Tokenizer

from coppice_bench.plan.world import AS_SERVED, PREFILL_TOKENS, PlanWorld
from coppice_bench.report import describe_run, note
from coppice_bench.timing import NS_PER_MS

SIZES = (1, 16, 64, 256, 1_024, 4_096)
_QUICK_SIZES = (1, 16)
_STEPS = 300
_QUICK_STEPS = 20


def run_plan(*, quick: bool) -> dict[str, Any]:
    steps = _QUICK_STEPS if quick else _STEPS
    tokenizer = Tokenizer.from_file(str(resources.files("coppice") / "demo_model" / "tokenizer.json"))
    plan_ms: dict[int, float] = {}
    step_cpu_ms: dict[int, float] = {}
    p90_ms: dict[int, float] = {}
    for size in _QUICK_SIZES if quick else SIZES:
        note(f"{size} running: warms up")
        world = PlanWorld(size, tokenizer, thread_time_ns)
        world.warm_up()
        note(f"{size} running: measures {steps} steps")
        times = [world.step() for _ in range(steps)]
        core = [times_ns.core / NS_PER_MS for times_ns in times]
        plan_ms[size] = median(core)
        step_cpu_ms[size] = median(times_ns.all / NS_PER_MS for times_ns in times)
        p90_ms[size] = sorted(core)[len(core) * 9 // 10]
    return {
        "bench": "plan",
        "plan_ms": plan_ms,
        "step_cpu_ms": step_cpu_ms,
        "plan_ms_p90": p90_ms,
        "steps": steps,
        "settings": {**AS_SERVED, "max_decode_steps": 1, "contested_prefill_tokens": PREFILL_TOKENS},
        **describe_run(),
    }
