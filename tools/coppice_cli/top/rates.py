"""Samples to rows: what changed between the oldest and the newest of them, by the second.

sample ... sample ... sample      at most WINDOW_S
'--------- rates ----------'      what is held, runs and waits is of the newest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coppice_cli.top.samples import DomainNow, Sample, SchedulerNow, TenantNow, WorkerNow

WINDOW_S = 60.0
_PRIVATE = "tenant/"  # how the domain of one tenant alone begins


@dataclass(frozen=True, slots=True)
class TenantRow:
    """None: not known, as a service did not answer or there was nothing to count. A share group is a row of its own."""

    name: str
    now: TenantNow | None
    in_per_s: float | None
    out_per_s: float | None
    hit_share: float | None  # of the window
    hit_share_ever: float | None  # since the cache's start
    domain: DomainNow | None
    evicted_per_s: float | None


@dataclass(frozen=True, slots=True)
class WorkerRow:
    name: str
    now: WorkerNow
    steps_per_s: float | None


@dataclass(frozen=True, slots=True)
class Frame:
    window_s: float
    tenants: tuple[TenantRow, ...]
    workers: tuple[WorkerRow, ...] | None  # None: the cache service did not answer
    steps_per_s: float | None
    preemptions_per_s: float | None
    reclaims_per_s: float | None
    faults: tuple[str, ...]


def kept(samples: Sequence[Sample]) -> list[Sample]:
    """Those of the window that the newest ends."""
    return [sample for sample in samples if samples[-1].at_s - sample.at_s <= WINDOW_S]


def frame_of(samples: Sequence[Sample]) -> Frame:
    """Of one sample or more, the newest last. Without two answers of a service there is no rate of it."""
    newest = samples[-1]
    caches = [(one.at_s, one.cache) for one in samples if one.cache is not None]
    schedulers = [(one.at_s, one.scheduler) for one in samples if one.scheduler is not None]
    cache, scheduler = newest.cache, newest.scheduler

    def of_scheduler(name: str) -> float | None:
        return _rate([(at_s, getattr(now, name)) for at_s, now in schedulers]) if scheduler is not None else None

    workers = None
    if cache is not None:
        workers = tuple(
            WorkerRow(
                name, now, _rate([(one.at_s, one.worker_steps[name]) for one in samples if name in one.worker_steps])
            )
            for name, now in sorted(cache.workers.items())
        )
    return Frame(
        newest.at_s - samples[0].at_s,
        tuple(
            _tenant_row(
                name,
                scheduler,
                [(at_s, now.tenants.get(name, TenantNow())) for at_s, now in schedulers] if scheduler else [],
                [(at_s, now.domains.get(_domain(name), DomainNow())) for at_s, now in caches] if cache else [],
            )
            for name in _names(newest)
        ),
        workers,
        of_scheduler("steps"),
        of_scheduler("preemptions"),
        of_scheduler("reclaims"),
        newest.faults,
    )


def _names(sample: Sample) -> list[str]:
    """Tenants, and domains that are not one tenant's alone; the busiest first."""
    tenants = {} if sample.scheduler is None else sample.scheduler.tenants
    domains = {} if sample.cache is None else sample.cache.domains
    names = {*tenants, *(name.removeprefix(_PRIVATE) for name in domains)}

    def busy(name: str) -> tuple[int, int, str]:
        of, held = tenants.get(name, TenantNow()), domains.get(_domain(name), DomainNow()).held
        return (-of.running - of.waiting, -held, name)

    return sorted(names, key=busy)


def _domain(name: str) -> str:
    return name if "/" in name else _PRIVATE + name


def _tenant_row(
    name: str,
    scheduler: SchedulerNow | None,
    as_tenant: Sequence[tuple[float, TenantNow]],
    as_domain: Sequence[tuple[float, DomainNow]],
) -> TenantRow:
    first, domain = (as_domain[0][1], as_domain[-1][1]) if as_domain else (None, None)
    of_window = None
    if first is not None and domain is not None:
        of_window = _share(domain.hit_tokens - first.hit_tokens, domain.query_tokens - first.query_tokens)
    return TenantRow(
        name,
        None if scheduler is None or "/" in name else scheduler.tenants.get(name, TenantNow()),
        _rate([(at_s, now.tokens_in) for at_s, now in as_tenant]),
        _rate([(at_s, now.tokens_out) for at_s, now in as_tenant]),
        of_window,
        None if domain is None else _share(domain.hit_tokens, domain.query_tokens),
        domain,
        _rate([(at_s, float(now.evicted)) for at_s, now in as_domain]),
    )


def _rate(counted: Sequence[tuple[float, float]]) -> float | None:
    """By the second. None where a service was started again, so that its count began anew."""
    if len(counted) < 2:
        return None
    (start_s, before), (end_s, after) = counted[0], counted[-1]
    return (after - before) / (end_s - start_s) if after >= before and end_s > start_s else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole > 0 else None
