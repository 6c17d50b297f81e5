"""One look at a stack: what the cache service, the scheduler and the workers say at one moment.

A service that does not answer leaves a fault instead, and the others are asked all the same.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from coppice.errors import CoppiceError

Answer = TypeVar("Answer")

REQUESTS_LOOKED_AT = 200  # the newest that have ended


class CacheReader(Protocol):
    def stats(self) -> Any: ...


class SchedulerReader(Protocol):
    def requests(self, limit: int, tenant: str) -> Any: ...
    def metrics(self) -> str: ...


class WorkerReader(Protocol):
    def metrics(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TenantNow:
    running: int = 0
    waiting: int = 0
    tokens_in: float = 0.0  # since the scheduler's start, of requests that have ended or begun to answer
    tokens_out: float = 0.0  # of requests that have ended
    ttft_ms: float | None = None  # median of the newest requests that have ended
    cause: str = ""  # what took longest, in most of them


@dataclass(frozen=True, slots=True)
class SchedulerNow:
    tenants: Mapping[str, TenantNow]
    steps: float
    preemptions: float
    reclaims: float


@dataclass(frozen=True, slots=True)
class DomainNow:
    held: int = 0  # blocks of all workers, leased or cached
    guarantee: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class WorkerNow:
    state: str
    num_blocks: int
    free: int
    leased: int
    cached: int
    draining: int
    leases: int


@dataclass(frozen=True, slots=True)
class CacheNow:
    domains: Mapping[str, DomainNow]
    workers: Mapping[str, WorkerNow]


@dataclass(frozen=True, slots=True)
class Sample:
    """None: the service did not answer. `faults`: a sentence for each that did not."""

    at_s: float  # of a monotonic clock
    cache: CacheNow | None
    scheduler: SchedulerNow | None
    worker_steps: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


def look(cache: CacheReader, scheduler: SchedulerReader, workers: Mapping[str, WorkerReader]) -> Sample:
    """Asks everybody once."""
    faults: list[str] = []

    def asked(read: Callable[[], Answer]) -> Answer | None:
        try:
            return read()
        except CoppiceError as error:
            faults.append(error.line())
            return None

    cache_now = asked(lambda: cache_of(cache.stats()))
    scheduler_now = asked(
        lambda: scheduler_of(scheduler.metrics(), scheduler.requests(REQUESTS_LOOKED_AT, "")["requests"])
    )
    steps = {name: asked(lambda of=of: steps_of(of.metrics())) for name, of in workers.items()}  # type: ignore[misc]
    return Sample(
        time.monotonic(),
        cache_now,
        scheduler_now,
        {name: count for name, count in steps.items() if count is not None},
        tuple(faults),
    )


def cache_of(stats: Any) -> CacheNow:
    """Of /v1/stats. A domain's blocks are summed up over workers."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0] * 5)
    workers: dict[str, WorkerNow] = {}
    for one in stats["workers"]:
        state = "drains" if one["draining"] else "open" if one["open"] else "recovering"
        workers[one["worker_id"]] = WorkerNow(
            state=state,
            num_blocks=one["num_blocks"],
            free=one["free_blocks"],
            leased=one["leased_blocks"],
            cached=one["cached_blocks"],
            draining=one["draining_blocks"],
            leases=one["leases"],
        )
        for of in one["domains"]:
            held = of["leased_blocks"] + of["cached_blocks"]
            added = (held, of["guarantee_blocks"], of["query_tokens"], of["hit_tokens"], of["evicted_blocks"])
            sums[of["domain"]] = [before + more for before, more in zip(sums[of["domain"]], added, strict=True)]
    return CacheNow({name: DomainNow(*of) for name, of in sums.items()}, workers)


def scheduler_of(metrics: str, requests: Sequence[Any]) -> SchedulerNow:
    """Of /metrics and of the newest records."""
    by_tenant: dict[str, dict[str, float]] = defaultdict(dict)
    totals: Counter[str] = Counter()
    for name, labels, value in _samples_of(metrics):
        if name == "coppice_scheduler_tenant_requests":
            by_tenant[labels["tenant"]][labels["state"]] = value
        elif name in _TOKENS:
            of = by_tenant[labels["tenant"]]
            of[name] = of.get(name, 0.0) + value
        else:
            totals[name] += value  # type: ignore[assignment]
    tenants = {}
    for tenant in {*by_tenant, *(record["tenant"] for record in requests if record.get("tenant"))}:
        of, ended = by_tenant[tenant], [record for record in requests if record.get("tenant") == tenant]
        first = [record["ttft_ms"] for record in ended if record.get("ttft_ms")]
        causes = Counter(record["cause"] for record in ended if record.get("cause"))
        tenants[tenant] = TenantNow(
            running=int(of.get("running", 0)),
            waiting=int(of.get("waiting", 0)),
            tokens_in=of.get("vllm:prompt_tokens_total", 0.0),
            tokens_out=of.get("vllm:generation_tokens_total", 0.0),
            ttft_ms=statistics.median(first) if first else None,
            cause=causes.most_common(1)[0][0] if causes else "",
        )
    return SchedulerNow(
        tenants,
        totals["coppice_scheduler_steps_total"],
        totals["vllm:num_preemptions_total"],
        totals["coppice_scheduler_reclaims_total"],
    )


def steps_of(metrics: str) -> float:
    """Of a worker's /metrics. Raises CoppiceError where it is another service's."""
    found = [value for name, _, value in _samples_of(metrics) if name == "coppice_worker_steps_total"]
    if not found:
        raise CoppiceError("what answers at a --worker address is no worker", hint="coppice up prints their metrics")
    return found[0]


_TOKENS = frozenset({"vllm:prompt_tokens_total", "vllm:generation_tokens_total"})


def _samples_of(metrics: str) -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each sample. Raises CoppiceError."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
        ]
    except ValueError as error:
        raise CoppiceError(f"metrics that cannot be read: {error}") from error
