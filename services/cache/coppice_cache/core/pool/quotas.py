"""Who may take how much of one worker's pool, and from whom.

    0 ........ guarantee ........ held ........ maximum
                        |<- over ->|
                        |<-lendable|      the part of `over` that is cached and unpinned: others may evict it

Never more than `maximum` is held (I13); nobody else ever evicts a domain below its guarantee (I14). What a strict
domain does not use of its share is reserved in the free list, so that its answers depend on its own history alone.
What others borrowed and still use has to be asked back (see `reclaim`); meanwhile what comes back is `promised`.
Both sums are kept up to date by `settle`, so that a decision costs the same with one domain or ten thousand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from coppice.messages.index import NoCapacityReason
from coppice_cache.core.base.settings import DomainConfig, Mode
from coppice_cache.core.eviction.adaptive import AdaptivePolicy
from coppice_cache.core.eviction.policy import EvictionPolicy
from coppice_cache.core.radix.tree import Node

_SLACK = 64


class DomainUse:
    """One domain on one worker: its limits, its blocks by state, its eviction queue, its counters."""

    __slots__ = (
        "cached",
        "config",
        "doomed",
        "draining",
        "evicted_blocks",
        "fenced_leases",
        "guarantee",
        "hit_tokens",
        "is_strict",
        "leased",
        "leases",
        "lendable",
        "maximum",
        "mean_hold_ms",
        "owner_index",
        "protected",
        "query_tokens",
        "queue",
        "queued_over",
        "reattached_peak",
        "reserve",
    )

    def __init__(
        self, config: DomainConfig, num_blocks: int, make_policy: Callable[[], EvictionPolicy] = AdaptivePolicy
    ) -> None:
        self.config = config
        self.is_strict = config.mode is Mode.STRICT
        self.guarantee = config.guarantee_of(num_blocks)
        self.maximum = config.maximum_of(num_blocks)
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
        self.fenced_leases = 0  # that were taken away because their session did not give back what it had borrowed
        self.mean_hold_ms = 1_000.0
        self.owner_index = 0  # where the ledger keeps this account
        self.queue = make_policy()
        self.doomed: list[Node] = []  # invalidated nodes that were not taken apart yet; the last one is next

    @property
    def held(self) -> int:
        return self.leased + self.cached + self.draining

    @property
    def evictable(self) -> int:
        return self.cached - self.protected

    @property
    def over(self) -> int:
        return max(0, self.held - self.guarantee)

    @property
    def headroom(self) -> int:
        """Blocks that it may still lease within its guarantee, when it evicts what it can of its own."""
        return max(0, self.guarantee - self.held + self.evictable)

    @property
    def spare(self) -> int:
        """Blocks that only itself may evict."""
        return self.evictable - self.lendable

    @property
    def firm(self) -> int:
        """Borrowed blocks that can be had only if somebody gives them back, and nobody does yet."""
        return max(0, self.over - self.lendable - self.draining)

    def is_within(self, count: int, newly_protected: int) -> bool:
        """So many more, and it still holds no more than its guarantee when it evicts what it can of its own."""
        return not self.is_strict and count + newly_protected <= self.headroom


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What to evict before a grant: from the domain itself because of its maximum, and because the pool is short."""

    from_own: int
    from_pool: int


NOTHING = EvictionPlan(0, 0)


class Quotas:
    """The domains of one worker."""

    def __init__(
        self,
        num_blocks: int,
        configs: tuple[DomainConfig, ...],
        make_policy: Callable[[], EvictionPolicy] = AdaptivePolicy,
    ) -> None:
        self.num_blocks = num_blocks
        self._make_policy = make_policy
        self.uses = {config.domain: DomainUse(config, num_blocks, make_policy) for config in configs}
        self.lendable = 0
        self.reserve = 0
        self.num_settled = 0  # changes so far, for those who want to know whether there were any
        self._strict = [use for use in self.uses.values() if use.is_strict]
        self.strict_share = sum(use.guarantee for use in self._strict)
        self._heap: list[tuple[int, int, DomainUse]] = []
        self._order = 0
        self._compact_at = _SLACK
        for use in self.uses.values():
            self.settle(use)

    def use_of(self, config: DomainConfig) -> DomainUse:
        use = self.uses.get(config.domain)
        if use is None:
            use = self.uses[config.domain] = DomainUse(config, self.num_blocks, self._make_policy)
        return use

    def forget_idle(self) -> None:
        """Drop unlisted domains that hold nothing; their counters go with them."""
        idle = [use for use in self.uses.values() if not use.held and not use.leases and not use.guarantee]
        for use in idle:
            del self.uses[use.config.domain]

    def settle(self, use: DomainUse) -> None:
        """Bring the sums up to date after any change of the domain's blocks or pins."""
        self.num_settled += 1
        cached = use.cached
        held = use.leased + cached + use.draining
        over = held - use.guarantee
        if over < 0:
            over = 0
        evictable = cached - use.protected
        lendable = evictable if evictable < over else over
        if lendable != use.lendable:
            self.lendable += lendable - use.lendable
            use.lendable = lendable
        if use.is_strict:
            reserve = max(0, use.guarantee - held)
            self.reserve += reserve - use.reserve
            use.reserve = reserve
        if lendable and use.queued_over != over:
            use.queued_over = over
            self._order += 1
            heappush(self._heap, (-over, self._order, use))
            if len(self._heap) > self._compact_at:
                self._compact()

    def available(self, num_free: int) -> int:
        """Blocks that domains without a fixed share could have at once."""
        return max(0, num_free - self.reserve) + self.lendable

    @property
    def strict_draining(self) -> int:
        return sum(use.draining for use in self._strict)

    def ceiling(self, use: DomainUse) -> int:
        """Most blocks that this domain could ever hold on this worker."""
        if use.config.mode is Mode.STRICT:
            return use.maximum
        return min(use.maximum, self.num_blocks - self.strict_share)

    def plan(
        self, use: DomainUse, count: int, *, num_free: int, newly_protected: int, promised: int = 0
    ) -> EvictionPlan | NoCapacityReason:
        """Decide, without doing anything, how `count` more blocks could be granted.

        Of what everybody could have, `promised` blocks are kept for others.
        """
        own_evictable = use.cached - use.protected - newly_protected
        from_own = use.leased + use.cached + use.draining + count - use.maximum
        if from_own < 0:
            from_own = 0
        if from_own > own_evictable:
            whole_pool = use.maximum >= self.num_blocks
            return NoCapacityReason.POOL_FULL if whole_pool else NoCapacityReason.DOMAIN_MAXIMUM
        free = max(0, num_free - (self.reserve - use.reserve))
        if count <= free and not from_own and not promised and own_evictable >= 0:
            return NOTHING
        others = self.lendable - use.lendable
        if promised:
            own_lendable = min(own_evictable, use.over)
            surplus = max(0, free + others + own_lendable - promised)
            if count > surplus + own_evictable - own_lendable:
                return NoCapacityReason.POOL_FULL
            from_own = max(from_own, count - surplus)
        from_pool = max(0, count - from_own - free)
        if from_pool > own_evictable - from_own + others:
            return NoCapacityReason.POOL_FULL
        return EvictionPlan(from_own, from_pool) if from_own or from_pool else NOTHING

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
