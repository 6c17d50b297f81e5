"""`coppice bench churn`: a load of chats on the real core, by block size: how much of what is allocated is in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coppice.errors import UsageError
from coppice_bench.arrivals import Arrival, make_arrivals, read_arrivals
from coppice_bench.index.churn_world import ChurnWorld
from coppice_bench.report import describe_run, note

BLOCK_SIZES = (8, 16, 32, 64, 128)
_QUICK_REQUESTS = 60
_EXHAUSTION_SHARE = 0.6  # of the blocks that the load needed at its peak
_SEED = 17


def run_churn(*, trace: Path | None, requests: int, capacity_tokens: int, quick: bool) -> dict[str, Any]:
    """Raises UsageError, CoppiceError."""
    if requests < 1:
        raise UsageError(f"--requests {requests}: must be positive")
    count = min(requests, _QUICK_REQUESTS) if quick else requests
    arrivals = read_arrivals(trace, count) if trace is not None else make_arrivals(count, _SEED)
    longest = max(arrival.input_tokens + arrival.output_tokens for arrival in arrivals)
    if capacity_tokens < longest + 2 * BLOCK_SIZES[-1]:
        raise UsageError(f"--capacity-tokens {capacity_tokens}: the longest request of the load takes {longest}")
    runs: dict[int, dict[str, Any]] = {}
    exhausted: dict[int, dict[str, Any]] = {}
    for block_size in BLOCK_SIZES:
        note(f"block size {block_size}")
        runs[block_size] = _run(arrivals, capacity_tokens // block_size, block_size)
        tight = max(int(runs[block_size]["peak_blocks"] * _EXHAUSTION_SHARE), longest // block_size + 2)
        note(f"block size {block_size}, {tight} blocks")
        exhausted[block_size] = _run(arrivals[: max(_QUICK_REQUESTS, count // 3)], tight, block_size)
    keys = next(iter(runs.values()))
    return {
        "bench": "churn",
        **{key: {block_size: run[key] for block_size, run in runs.items()} for key in keys},
        "exhaustion": exhausted,
        "requests": len(arrivals),
        "load": str(trace.name) if trace is not None else "made up",
        "capacity_tokens": capacity_tokens,
        **describe_run(),
    }


def _run(arrivals: list[Arrival], num_blocks: int, block_size: int) -> dict[str, Any]:
    return ChurnWorld(num_blocks, block_size, _SEED).run(arrivals)
