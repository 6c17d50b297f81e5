"""`coppice bench trace`: hit rate of an eviction policy on a trace, beside LRU and the optimum with foresight."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coppice.errors import UsageError
from coppice_bench.report import describe_run, note, print_report
from coppice_bench.trace import policies as trace_policies
from coppice_bench.trace.file import Trace, read_trace
from coppice_bench.trace.policies import Prompts
from coppice_bench.trace.replay import replay
from coppice_cache.core.base.settings import Eviction
from coppice_cache.core.eviction.adaptive import POLICIES

_OURS = {eviction.value: POLICIES[eviction] for eviction in Eviction}
_OTHERS: Mapping[str, Callable[[Prompts, int], int]] = {
    "arc": trace_policies.arc,
    "s3fifo": trace_policies.s3fifo,
    "optimum": trace_policies.optimum,
}
POLICY_NAMES = (*_OURS, *_OTHERS)
_DIGITS = 5


def run_trace(*, path: Path, capacity_blocks: int, policy: str) -> dict[str, Any]:
    """Raises UsageError for a file, a capacity or a policy that cannot be used.

    `gap_closed` is (hit_rate - lru) / (optimum - lru), and None where LRU is optimal.
    """
    if policy not in POLICY_NAMES:
        raise UsageError(f"--policy {policy!r} is not known", hint=f"one of {', '.join(POLICY_NAMES)}")
    if capacity_blocks < 1:
        raise UsageError(f"--capacity-blocks {capacity_blocks} must be at least 1")
    trace = read_trace(path)
    note(f"{path.name}: {len(trace.requests)} requests, {trace.num_blocks} blocks")
    return {"bench": "trace", **measure(trace, capacity_blocks, policy), "trace": path.name, **describe_run()}


def measure(trace: Trace, capacity: int, policy: str) -> dict[str, Any]:
    prompts = [request.hash_ids for request in trace.requests]
    note("replaying LRU and the optimum")
    lru = trace_policies.lru(prompts, capacity) / trace.num_blocks
    optimum = trace_policies.optimum(prompts, capacity) / trace.num_blocks
    note(f"replaying {policy}")
    cost: dict[str, float] = {}
    if policy in _OURS:
        replayed = replay(trace, _OURS[policy](), capacity)
        hit_rate = replayed.hit_rate
        cost = {"us_per_block_operation": round(replayed.us_per_operation, _DIGITS)}
    else:
        hit_rate = _OTHERS[policy](prompts, capacity) / trace.num_blocks
    return {
        "policy": policy,
        "capacity_blocks": capacity,
        "hit_rate": round(hit_rate, _DIGITS),
        "lru": round(lru, _DIGITS),
        "optimum": round(optimum, _DIGITS),
        "gap_closed": round((hit_rate - lru) / (optimum - lru), _DIGITS) if optimum > lru else None,
        **cost,
        "requests": len(trace.requests),
        "blocks": trace.num_blocks,
        "block_size": trace.block_size,
    }


def print_trace_report(report: dict[str, Any], *, as_json: bool) -> None:
    """Rates keep all their digits in JSON: the gap may be narrow."""
    if as_json:
        print(json.dumps(report), flush=True)
    else:
        print_report(report, as_json=False)
