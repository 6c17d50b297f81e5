"""From records to numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from coppice_bench.serve.load.records import Record
from coppice_bench.serve.options import ServeOptions

PERCENTILES = (50, 90, 99)
_EXAMPLES_MAX = 4


def summary(records: Sequence[Record], options: ServeOptions, start_s: float) -> dict[str, Any]:
    """Throughput, times, cache and errors of all and by tenant. Times in milliseconds, rates per second."""
    duration_s = max((record.end_s for record in records), default=start_s) - start_s
    found = _part(records, options, duration_s)
    if options.tenants:
        found["by_tenant"] = {
            sender.name: _part([r for r in records if r.sender == number], options, duration_s)
            for number, sender in enumerate(options.senders)
        }
        found["jain"] = jain(served_tokens(records, len(options.senders)))
    return {"duration_s": duration_s, **found}


def _part(records: Sequence[Record], options: ServeOptions, duration_s: float) -> dict[str, Any]:
    done = [record for record in records if record.is_ok]
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    seconds = duration_s or 1.0
    return {
        "requests": len(done),
        "requests_s": len(done) / seconds,
        "input_tok_s": prompt_tokens / seconds,
        "output_tok_s": output_tokens / seconds,
        "ttft_ms": percentiles([record.ttft_ms for record in done]),
        "tpot_ms": percentiles([record.tpot_ms for record in done if record.output_tokens > 1]),
        "e2e_ms": percentiles([record.e2e_ms for record in done]),
        "cached_share": sum(record.cached_tokens for record in done) / prompt_tokens if prompt_tokens else 0.0,
        "input_tokens_mean": prompt_tokens / len(done) if done else 0.0,
        "output_tokens_mean": output_tokens / len(done) if done else 0.0,
        **({"goodput": goodput(records, options, seconds)} if options.ttft_ms or options.tpot_ms else {}),
        "errors": errors(records),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 by linear interpolation, and the mean; empty without values."""
    if not values:
        return {}
    found = np.percentile(values, PERCENTILES)
    return {**{f"p{at}": float(value) for at, value in zip(PERCENTILES, found, strict=True)},
            "mean": float(np.mean(values))}  # fmt: skip


def goodput(records: Sequence[Record], options: ServeOptions, seconds: float) -> dict[str, float]:
    """Requests that were answered within the limits; those that failed were not."""
    good = [
        record
        for record in records
        if record.is_ok
        and (not options.ttft_ms or record.ttft_ms <= options.ttft_ms)
        and (not options.tpot_ms or record.tpot_ms <= options.tpot_ms)
    ]
    limits = {name: getattr(options, name) for name in ("ttft_ms", "tpot_ms") if getattr(options, name)}
    return {
        "requests_s": len(good) / seconds,
        "output_tok_s": sum(record.output_tokens for record in good) / seconds,
        "share": len(good) / len(records) if records else 0.0,
        **{f"limit_{name}": limit for name, limit in limits.items()},
    }


def errors(records: Sequence[Record]) -> dict[str, Any]:
    """How many by outcome, with some of the servers' words."""
    counts = Counter(record.outcome for record in records if not record.is_ok)
    said = dict.fromkeys(f"{record.outcome}: {record.message}" for record in records if not record.is_ok)
    return {**dict(counts), "examples": list(said)[:_EXAMPLES_MAX]} if counts else {}


def served_tokens(records: Sequence[Record], num_senders: int) -> list[int]:
    """Computed and generated tokens of each sender, as long as all of them had work: until the first one ended.

    Cached tokens cost nothing, so they are nobody's share.
    """
    done = [record for record in records if record.is_ok]
    lasts = [max((r.end_s for r in done if r.sender == number), default=0.0) for number in range(num_senders)]
    until_s = min(lasts)
    counted = [r for r in done if r.end_s <= until_s]
    return [
        sum(r.prompt_tokens - r.cached_tokens + r.output_tokens for r in counted if r.sender == number)
        for number in range(num_senders)
    ]


def jain(shares: Sequence[float]) -> float:
    """(Σx)² / (n Σx²): 1 where all get the same, 1/n where one gets everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0
