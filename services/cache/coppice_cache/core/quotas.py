"""Who may take how much of one worker's pool, and from whom.

    0 ........ guarantee ........ held ........ maximum
                        |<- over ->|
                        |<-lendable|      the part of `over` that is cached and unpinned: others may evict it

Never more than `maximum` is held (I13); nobody else ever evicts a domain below its guarantee (I14). What a strict
domain does not use of its share is reserved in the free list, so that its answers depend on its own history alone.
Both sums are kept up to date by `settle`, so that a decision costs the same with one domain or ten thousand.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from coppice.messages.index import NoCapacityReason
from coppice_cache.core.eviction import EvictionQueue
from coppice_cache.core.settings import DomainConfig, Mode

_SLACK = 64


class DomainUse:
    """One domain on one worker: its limits, its blocks by state, its eviction queue, its counters."""

    __slots__ = (
        "cached",
        "config",
        "draining",
        "evicted_blocks",
        "guarantee",
        "hit_tokens",
        "leased",
        "leases",
        "lendable",
        "maximum",
        "mean_hold_ms",
        "protected",
        "query_tokens",
        "queue",
        "queued_over",
        "reattached_peak",
        "reserve",
    )

    def __init__(self, config: DomainConfig, num_blocks: int) -> None:
        self.config = config
        self.guarantee = config.guarantee_blocks(num_blocks)
        self.maximum = config.maximum_blocks(num_blocks)
        self.leased = 0
        self.cached = 0
        self.draining = 0
        self.protected = 0  # cached blocks with a pin at or below them
        self.leases = 0
        self.lendable = 0
        self.reserve = 0
        self.queued_over = 0
        self.reattached_peak = 0  # held after a re-attachment; may exceed a maximum that was lowered meanwhile
        self.hit_tokens = 0
        self.query_tokens = 0
        self.evicted_blocks = 0
        self.mean_hold_ms = 1_000.0
        self.queue = EvictionQueue()

    @property
    def held(self) -> int:
        return self.leased + self.cached + self.draining

    @property
    def evictable(self) -> int:
        return self.cached - self.protected

    @property
    def over(self) -> int:
        return max(0, self.held - self.guarantee)


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What to evict before a grant: from the domain itself because of its maximum, and because the pool is short."""

    from_own: int
    from_pool: int


class Quotas:
    """The domains of one worker."""

    def __init__(self, num_blocks: int, configs: tuple[DomainConfig, ...]) -> None:
        self.num_blocks = num_blocks
        self.uses = {config.domain: DomainUse(config, num_blocks) for config in configs}
        self.lendable = 0
        self.reserve = 0
        self.strict_share = sum(use.guarantee for use in self.uses.values() if use.config.mode is Mode.STRICT)
        self._heap: list[tuple[int, int, DomainUse]] = []
        self._order = 0
        self._compact_at = _SLACK
        for use in self.uses.values():
            self.settle(use)

    def use_of(self, config: DomainConfig) -> DomainUse:
        use = self.uses.get(config.domain)
        if use is None:
            use = self.uses[config.domain] = DomainUse(config, self.num_blocks)
        return use

    def forget_idle(self) -> None:
        """Drop unlisted domains that hold nothing; their counters go with them."""
        idle = [use for use in self.uses.values() if not use.held and not use.leases and not use.guarantee]
        for use in idle:
            del self.uses[use.config.domain]

    def settle(self, use: DomainUse) -> None:
        """Bring the sums up to date after any change of the domain's blocks or pins."""
        over = use.over
        lendable = min(use.evictable, over)
        self.lendable += lendable - use.lendable
        use.lendable = lendable
        if use.config.mode is Mode.STRICT:
            reserve = max(0, use.guarantee - use.held)
            self.reserve += reserve - use.reserve
            use.reserve = reserve
        if lendable and use.queued_over != over:
            use.queued_over = over
            self._order += 1
            heappush(self._heap, (-over, self._order, use))
            if len(self._heap) > self._compact_at:
                self._compact()

    def ceiling(self, use: DomainUse) -> int:
        """Most blocks that this domain could ever hold on this worker."""
        if use.config.mode is Mode.STRICT:
            return use.maximum
        return min(use.maximum, self.num_blocks - self.strict_share)

    def plan(
        self, use: DomainUse, count: int, *, num_free: int, newly_protected: int
    ) -> EvictionPlan | NoCapacityReason:
        """Decide, without doing anything, how `count` more blocks could be granted."""
        own_evictable = use.evictable - newly_protected
        from_own = max(0, use.held + count - use.maximum)
        if from_own > own_evictable:
            whole_pool = use.maximum >= self.num_blocks
            return NoCapacityReason.POOL_FULL if whole_pool else NoCapacityReason.DOMAIN_MAXIMUM
        free = max(0, num_free - (self.reserve - use.reserve))
        from_pool = max(0, count - from_own - free)
        others = self.lendable - use.lendable
        if from_pool > own_evictable - from_own + others:
            return NoCapacityReason.POOL_FULL
        return EvictionPlan(from_own, from_pool)

    def furthest_over(self) -> DomainUse | None:
        """The domain that is furthest over its guarantee and has something to lend; None when nobody has."""
        while self._heap:
            negative_over, _, use = self._heap[0]
            if use.lendable and use.over == -negative_over:
                return use
            heappop(self._heap)
            if use.queued_over == -negative_over:
                use.queued_over = 0
        return None

    def _compact(self) -> None:
        live = {id(use): (key, order, use) for key, order, use in self._heap if use.lendable and use.over == -key}
        for use in self.uses.values():
            use.queued_over = use.over if id(use) in live else 0
        self._heap = list(live.values())
        heapify(self._heap)
        self._compact_at = 2 * len(self._heap) + _SLACK
