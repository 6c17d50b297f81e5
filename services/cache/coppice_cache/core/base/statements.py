"""Statements: what of each pool each domain held, and for how long, in whole numbers of blocks times nanoseconds.

All are counted from the registration of a worker epoch, and only ever grow. For each pool

    Σ held of its domains + unclaimed + free = pool

and of a domain: held - borrowed is never more than guaranteed; lent is at most what it did not hold of its guarantee.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from coppice.ids import CacheEpoch, DomainId, WorkerEpoch, WorkerId
from coppice_cache.core.base.events import Tier

OTHER_DOMAINS = DomainId("")  # a sum of domains that are not kept by name; no client can name it


@dataclass(frozen=True, slots=True)
class DomainStatement:
    domain: DomainId
    guaranteed_block_ns: int = 0
    leased_block_ns: int = 0
    cached_block_ns: int = 0
    draining_block_ns: int = 0  # until a worker has acknowledged a fence
    borrowed_block_ns: int = 0  # held beyond its guarantee
    lent_block_ns: int = 0  # of its guarantee, what others held
    evicted_blocks: int = 0
    displaced_blocks: int = 0  # of those evicted, what went for blocks of other domains
    displaced_others_blocks: int = 0  # what other domains had to evict for this one

    @property
    def held_block_ns(self) -> int:
        return self.leased_block_ns + self.cached_block_ns + self.draining_block_ns

    def named(self, domain: DomainId) -> DomainStatement:
        return replace(self, domain=domain)

    def plus(self, other: DomainStatement) -> DomainStatement:
        """The sum, under this one's name."""
        return DomainStatement(self.domain, *(getattr(self, name) + getattr(other, name) for name in _SUMMED))


_SUMMED = tuple(field.name for field in fields(DomainStatement) if field.name != "domain")


@dataclass(frozen=True, slots=True)
class PoolTime:
    """The whole of a pool, and what of it no domain held."""

    pool_block_ns: int = 0
    free_block_ns: int = 0
    unclaimed_block_ns: int = 0  # of before a restart of the cache, in the window: nobody knows yet whose it is

    def plus(self, other: PoolTime) -> PoolTime:
        return PoolTime(
            self.pool_block_ns + other.pool_block_ns,
            self.free_block_ns + other.free_block_ns,
            self.unclaimed_block_ns + other.unclaimed_block_ns,
        )


@dataclass(frozen=True, slots=True)
class PoolStatement:
    """One tier of one live worker epoch, or the sum of one tier over all worker epochs that are dead."""

    tier: Tier
    time: PoolTime
    domains: tuple[DomainStatement, ...]
    num_epochs: int = 1
    worker_id: WorkerId = WorkerId("")  # empty of the dead ones
    worker_epoch: WorkerEpoch = WorkerEpoch(0)
    num_blocks: int = 0
    elapsed_ns: int = 0  # since its registration

    @property
    def excess_block_ns(self) -> int:
        """What the parts sum to above the whole: always 0."""
        parts = sum(domain.held_block_ns for domain in self.domains)
        return parts + self.time.free_block_ns + self.time.unclaimed_block_ns - self.time.pool_block_ns


def total(pools: Iterable[PoolStatement]) -> tuple[PoolStatement, ...]:
    """One sum for each tier. Blocks and elapsed time are not summed: they say nothing of pools at different times."""
    times: dict[Tier, PoolTime] = {}
    epochs: Counter[Tier] = Counter()
    domains: dict[Tier, dict[DomainId, DomainStatement]] = {}
    for pool in pools:
        times[pool.tier] = times.get(pool.tier, PoolTime()).plus(pool.time)
        epochs[pool.tier] += pool.num_epochs
        sums = domains.setdefault(pool.tier, {})
        for found in pool.domains:
            before = sums.get(found.domain)
            sums[found.domain] = found if before is None else before.plus(found)
    return tuple(
        PoolStatement(tier, time, tuple(domains[tier].values()), num_epochs=epochs[tier])
        for tier, time in sorted(times.items())
    )


@dataclass(frozen=True, slots=True)
class Statement:
    """Of one incarnation of the cache service since it began; what was before it is not in it."""

    cache_epoch: CacheEpoch
    elapsed_ns: int
    pools: tuple[PoolStatement, ...]  # of live workers
    ended: tuple[PoolStatement, ...]  # of dead worker epochs, one for each tier that had any
