"""`coppice bench trace`: hit rates of eviction policies on traces, beside LRU and the optimum with foresight."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from coppice.errors import UsageError
from coppice_bench.report import describe_run, note, print_report
from coppice_bench.trace import policies as trace_policies
from coppice_bench.trace.file import Trace, read_trace
from coppice_bench.trace.generated import GENERATED
from coppice_bench.trace.hints import hints
from coppice_bench.trace.policies import Prompts
from coppice_bench.trace.replay import replay
from coppice_cache.core.base.settings import Eviction
from coppice_cache.core.eviction.adaptive import POLICIES, AdaptivePolicy
from coppice_cache.core.eviction.policy import ReuseHint

_OURS = {eviction.value: POLICIES[eviction] for eviction in Eviction}
_OTHERS: Mapping[str, Callable[[Prompts, int], int]] = {
    "arc": trace_policies.arc,
    "s3fifo": trace_policies.s3fifo,
    "optimum": trace_policies.optimum,
}
POLICY_NAMES = (*_OURS, *_OTHERS)
_BY_KIND = "adaptive_by_kind"
_DIGITS = 5
_SEED, _GENERATED_REQUESTS = 1, 10_000
_GAP_MIN = 0.01


def run_trace(*, path: Path, capacity_blocks: int, policy: str, accuracies: Sequence[float] = ()) -> dict[str, Any]:
    """Raises UsageError for a file, a capacity or a policy that cannot be used.

    `gap_closed` is (hit_rate - lru) / (optimum - lru), and None where LRU is optimal. For each of `accuracies` the
    adaptive policy is also told hints that are so often right (`adaptive_hints_0.8`).
    """
    if policy not in POLICY_NAMES:
        raise UsageError(f"--policy {policy!r} is not known", hint=f"one of {', '.join(POLICY_NAMES)}")
    if capacity_blocks < 1:
        raise UsageError(f"--capacity-blocks {capacity_blocks} must be at least 1")
    if accuracies and policy != Eviction.ADAPTIVE.value:
        raise UsageError(f"--hints: policy {policy} ignores them", hint=f"--policy {Eviction.ADAPTIVE.value}")
    trace = read_trace(path)
    note(f"{path.name}: {len(trace.requests)} requests, {trace.num_blocks} blocks")
    found = measure(trace, capacity_blocks, policy)
    for name, rate in _hinted_rates(trace, capacity_blocks, accuracies).items():
        found[name] = {
            "hit_rate": round(rate, _DIGITS),
            "gap_closed": _gap_closed(rate, found["lru"], found["optimum"]),
        }
    return {"bench": "trace", **found, "trace": path.name, **describe_run()}


def run_traces(
    *, paths: Iterable[Path], capacities: Sequence[int], generated: bool, accuracies: Sequence[float] = ()
) -> dict[str, Any]:
    """All policies on all traces in all sizes; the adaptive one also told kinds of calls and which answers call tools,
    and hints. Raises UsageError.

    `traces`: hit rates by trace, size and policy. `worst` and `mean` of each policy: points above LRU, in percent of
    blocks; `gap_closed` is the mean share of what the optimum has and LRU has not, where that is a point or more.
    """
    traces = {path.name: read_trace(path) for path in paths}
    if generated:
        note(f"generating {len(GENERATED)} traces")
        traces |= {name: make(_SEED, _GENERATED_REQUESTS) for name, make in GENERATED.items()}
    if not traces:
        raise UsageError("no trace is given", hint="--trace FILE, or --generated")
    rates: dict[str, dict[int, dict[str, float]]] = {name: {} for name in traces}
    for name, trace in traces.items():
        for capacity in capacities:
            note(f"{name}: {capacity} blocks")
            rates[name][capacity] = _rates(trace, capacity, accuracies)
    rows = {(name, size): found for name, sizes in rates.items() for size, found in sizes.items()}
    names = next(iter(rows.values()))
    summary = {policy: _summary(rows, policy) for policy in names}
    return {"bench": "traces", "policies": summary, "traces": rates, **describe_run()}


def _hinted_rates(trace: Trace, capacity: int, accuracies: Sequence[float]) -> dict[str, float]:
    found = {}
    for accuracy in accuracies:
        said = [ReuseHint(reuse) for reuse in hints(trace, accuracy, _SEED)]
        found[f"adaptive_hints_{accuracy:g}"] = replay(trace, AdaptivePolicy(), capacity, said).hit_rate
    return found


def _rates(trace: Trace, capacity: int, accuracies: Sequence[float]) -> dict[str, float]:
    prompts = [request.hash_ids for request in trace.requests]
    found = {name: replay(trace, make(), capacity).hit_rate for name, make in _OURS.items()}
    kinds = [ReuseHint(call_kind=request.call_kind, outcome=request.outcome) for request in trace.requests]
    has_kinds = any(request.call_kind for request in trace.requests)
    adaptive = found[Eviction.ADAPTIVE.value]
    found[_BY_KIND] = replay(trace, AdaptivePolicy(), capacity, kinds).hit_rate if has_kinds else adaptive
    found |= _hinted_rates(trace, capacity, accuracies)
    found |= {name: hits(prompts, capacity) / trace.num_blocks for name, hits in _OTHERS.items()}
    return {name: round(rate, _DIGITS) for name, rate in found.items()}


def _summary(rows: Mapping[tuple[str, int], Mapping[str, float]], policy: str) -> dict[str, Any]:
    points = {place: 100 * (rates[policy] - rates["lru"]) for place, rates in rows.items()}
    gaps = [
        (rates[policy] - rates["lru"]) / (rates["optimum"] - rates["lru"])
        for rates in rows.values()
        if rates["optimum"] - rates["lru"] >= _GAP_MIN
    ]
    worst = min(points, key=lambda place: points[place])
    return {
        "worst": round(points[worst], 2),
        "worst_at": f"{worst[0]}, {worst[1]} blocks",
        "mean": round(fmean(points.values()), 2),
        "gap_closed": round(fmean(gaps), 3) if gaps else None,
    }


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
        "gap_closed": _gap_closed(hit_rate, lru, optimum),
        **cost,
        "requests": len(trace.requests),
        "blocks": trace.num_blocks,
        "block_size": trace.block_size,
    }


def _gap_closed(rate: float, lru: float, optimum: float) -> float | None:
    return round((rate - lru) / (optimum - lru), _DIGITS) if optimum > lru else None


def print_trace_report(report: dict[str, Any], *, as_json: bool) -> None:
    """Rates keep all their digits in JSON: the gap may be narrow."""
    if as_json:
        print(json.dumps(report), flush=True)
    else:
        print_report(report, as_json=False)
