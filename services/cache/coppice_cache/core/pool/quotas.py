"""Who may take how much of one worker's pool, and from whom.

    0 ........ guarantee ........ held ........ maximum
                        |<- over ->|
                        |<-lendable|      the part of `over` that is cached and unpinned: others may evict it

Never more than `maximum` is held (I13); nobody else ever evicts a domain below its guarantee (I14). What a strict
domain does not use of its share is reserved in the free list, so that its answers depend on its own history alone.
What others borrowed and still use has to be asked back (see `reclaim`); meanwhile what comes back is `promised`.
Both sums are kept up to date by `refresh`, so that a decision costs the same with one domain or ten thousand.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from coppice.ids import DomainId
from coppice.messages.index import NoCapacityReason
from coppice_cache.core.base.settings import DomainConfig, Mode
from coppice_cache.core.eviction.adaptive import AdaptivePolicy
from coppice_cache.core.eviction.policy import EvictionPolicy
from coppice_cache.core.pool.block_time import BlockTime, CallTime, DomainTime
from coppice_cache.core.pool.free_ring import Blocks
from coppice_cache.core.radix.tree import Node

_SLACK = 64


class Account:
    """One domain on one worker: its limits, its blocks by state, its eviction queue, its counters."""

    __slots__ = (
        "cached",
        "config",
        "deferred_free",
        "displaced_blocks",
        "displaced_others_blocks",
        "draining",
        "evicted_blocks",
        "eviction",
        "fenced_leases",
        "guarantee",
        "hit_tokens",
        "is_strict",
        "is_touched",
        "leased",
        "leases",
        "lendable",
        "maximum",
        "mean_hold_ms",
        "owner_index",
        "protected",
        "query_tokens",
        "queued_over",
        "reattached_peak",
        "reserve",
        "time",
    )

    def __init__(
        self, config: DomainConfig, num_blocks: int, make_policy: Callable[[], EvictionPolicy] = AdaptivePolicy
    ) -> None:
        self.configure(config, num_blocks)
        self.leased = 0
        self.cached = 0
        self.draining = 0
        self.protected = 0  # cached blocks with a pin at or below them
        self.leases = 0
        self.lendable = 0
        self.reserve = 0
        self.queued_over = 0
        self.reattached_peak = 0  # held when it was re-attached or its maximum was lowered; may exceed the maximum
        self.hit_tokens = 0
        self.query_tokens = 0
        self.evicted_blocks = 0
        self.displaced_blocks = 0  # of those, what went for blocks of other domains
        self.displaced_others_blocks = 0  # evicted of other domains for this one
        self.time = DomainTime()
        self.is_touched = False  # since its block time was settled; see `CallTime`
        self.fenced_leases = 0  # that were taken away because their session did not give back what it had borrowed
        self.mean_hold_ms = 1_000.0
        self.owner_index = 0  # where the ledger keeps this account
        self.eviction = make_policy()
        self.deferred_free: list[Node] = []  # invalidated nodes that were not taken apart yet; the last one is next

    def configure(self, config: DomainConfig, num_blocks: int) -> None:
        self.config = config
        self.is_strict = config.mode is Mode.STRICT
        self.guarantee = config.guarantee_of(num_blocks)
        self.maximum = config.maximum_of(num_blocks)

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
        block_time: BlockTime | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_time = block_time or BlockTime([num_blocks], CallTime())
        self._make_policy = make_policy
        self.accounts = {config.domain: Account(config, num_blocks, make_policy) for config in configs}
        self.lendable = 0
        self.reserve = 0
        self.num_settled = 0  # changes so far, for those who want to know whether there were any
        self._find_strict()
        self._heap: list[tuple[int, int, Account]] = []
        self._order = 0
        self._compact_at = _SLACK
        for account in self.accounts.values():
            self.block_time.shares_changed(account)
            self.refresh(account)

    def _find_strict(self) -> None:
        self._strict = [account for account in self.accounts.values() if account.is_strict]
        self.strict_share = sum(account.guarantee for account in self._strict)

    def reconfigure(self, configs: tuple[DomainConfig, ...], removed: set[DomainId]) -> None:
        """These domains are listed from now on. One that was removed keeps what it holds, and has no right to it."""
        listed = {config.domain: config for config in configs}
        for domain, account in list(self.accounts.items()):
            before = account.config
            config = DomainConfig(domain, Mode.DISABLED) if domain in removed else listed.pop(domain, before)
            account.configure(replace(config, zero_on_change=config.zero_on_change or before.wipes), self.num_blocks)
            if account.held > account.maximum:
                account.reattached_peak = max(account.reattached_peak, account.held)
            self.reserve -= account.reserve
            account.reserve = 0
        for config in listed.values():
            self.accounts[config.domain] = Account(config, self.num_blocks, self._make_policy)
        self._find_strict()
        for account in self.accounts.values():
            self.block_time.shares_changed(account)
            self.refresh(account)

    def use_of(self, config: DomainConfig) -> Account:
        account = self.accounts.get(config.domain)
        if account is None:
            account = self.accounts[config.domain] = Account(config, self.num_blocks, self._make_policy)
            self.block_time.shares_changed(account)
        return account

    def has_place(self, domain: DomainId, domains_max: int) -> bool:
        """Whether the domain has an account, or may get one."""
        return domain in self.accounts or len(self.accounts) < domains_max

    def makes_place(self, domain: DomainId, domains_max: int) -> bool:
        """The same, once those that hold nothing are forgotten where they stand in the way."""
        if not self.has_place(domain, domains_max):
            self.forget_idle()
        return self.has_place(domain, domains_max)

    def forget_idle(self) -> None:
        """Drop unlisted domains that hold nothing; but for block time their counters go with them."""
        idle = [
            account
            for account in self.accounts.values()
            if not account.held and not account.leases and not account.guarantee
        ]
        for account in idle:
            self.block_time.close(account)
            del self.accounts[account.config.domain]

    def refresh(self, account: Account) -> None:
        """Bring the sums up to date after any change of the domain's blocks or pins."""
        self.num_settled += 1
        cached = account.cached
        held = account.leased + cached + account.draining
        over = held - account.guarantee
        if over < 0:
            over = 0
        evictable = cached - account.protected
        lendable = evictable if evictable < over else over
        if lendable != account.lendable:
            self.lendable += lendable - account.lendable
            account.lendable = lendable
        if account.is_strict:
            reserve = max(0, account.guarantee - held)
            self.reserve += reserve - account.reserve
            account.reserve = reserve
        if lendable and account.queued_over != over:
            account.queued_over = over
            self._order += 1
            heappush(self._heap, (-over, self._order, account))
            if len(self._heap) > self._compact_at:
                self._compact()

    def available(self, num_free: int) -> int:
        """Blocks that domains without a fixed share could have at once."""
        return max(0, num_free - self.reserve) + self.lendable

    @property
    def strict_draining(self) -> int:
        return sum(account.draining for account in self._strict)

    def ceiling(self, account: Account) -> int:
        """Most blocks that this domain could ever hold on this worker."""
        if account.config.mode is Mode.STRICT:
            return account.maximum
        return min(account.maximum, self.num_blocks - self.strict_share)

    def plan(
        self, account: Account, count: int, *, num_free: int, newly_protected: int, promised: int = 0
    ) -> EvictionPlan | NoCapacityReason:
        """Decide, without doing anything, how `count` more blocks could be granted.

        Of what everybody could have, `promised` blocks are kept for others.
        """
        own_evictable = account.cached - account.protected - newly_protected
        from_own = account.leased + account.cached + account.draining + count - account.maximum
        if from_own < 0:
            from_own = 0
        if from_own > own_evictable:
            whole_pool = account.maximum >= self.num_blocks
            return NoCapacityReason.POOL_FULL if whole_pool else NoCapacityReason.DOMAIN_MAXIMUM
        free = max(0, num_free - (self.reserve - account.reserve))
        if count <= free and not from_own and not promised and own_evictable >= 0:
            return NOTHING
        others = self.lendable - account.lendable
        if promised:
            own_lendable = min(own_evictable, account.over)
            surplus = max(0, free + others + own_lendable - promised)
            if count > surplus + own_evictable - own_lendable:
                return NoCapacityReason.POOL_FULL
            from_own = max(from_own, count - surplus)
        from_pool = max(0, count - from_own - free)
        if from_pool > own_evictable - from_own + others:
            return NoCapacityReason.POOL_FULL
        return EvictionPlan(from_own, from_pool) if from_own or from_pool else NOTHING

    def furthest_over(self) -> Account | None:
        """The domain that is furthest over its guarantee and has something to lend; None when nobody has."""
        while self._heap:
            negative_over, _, account = self._heap[0]
            if account.lendable and account.over == -negative_over:
                return account
            heappop(self._heap)
            if account.queued_over == -negative_over:
                account.queued_over = 0
        return None

    def _compact(self) -> None:
        live = {
            id(account): (key, order, account)
            for key, order, account in self._heap
            if account.lendable and account.over == -key
        }
        for account in self.accounts.values():
            account.queued_over = account.over if id(account) in live else 0
        self._heap = list(live.values())
        heapify(self._heap)
        self._compact_at = 2 * len(self._heap) + _SLACK


# Stand-ins for the last domain of a block; no client can name either.
_NOBODY = DomainConfig(DomainId(""))  # never granted
_UNKNOWN = DomainConfig(DomainId("\0unknown"))  # granted by an earlier cache epoch
UNKNOWN_INDEX = 1
_VACANT_SLACK = 64


class Owners:
    """Which account had each block last: an index per block into a table of accounts.

    An account that was the last one of no block can be forgotten and its place used again, so the table grows with the
    domains that left something behind, not with all that ever were.
    `index` has one entry per block; `indices` is its numpy view, shape [num_blocks].
    """

    __slots__ = ("_sweep_at", "_vacant", "accounts", "index", "indices", "nobody", "unknown")

    def __init__(self, num_blocks: int) -> None:
        self.index = array("i", bytes(4 * num_blocks))
        self.indices = np.frombuffer(self.index, np.int32)
        self.nobody = Account(_NOBODY, 0)
        self.unknown = Account(_UNKNOWN, 0)
        self.unknown.time.may_borrow = False
        self.unknown.owner_index = UNKNOWN_INDEX
        self.accounts = [self.nobody, self.unknown]
        self._vacant: list[int] = []
        self._sweep_at = _VACANT_SLACK

    def use_of(self, block: int) -> Account:
        return self.accounts[self.index[block]]

    def uses_of(self, blocks: Blocks) -> list[Account]:
        """The accounts of these blocks, each once."""
        return [self.accounts[index] for index in set(self.indices[blocks].tolist())]

    def index_of(self, account: Account) -> int:
        """The place of an account in the table; it gets one when it has none."""
        index = account.owner_index
        if index < len(self.accounts) and self.accounts[index] is account:
            return index
        if not self._vacant and len(self.accounts) >= self._sweep_at:
            self._sweep()
        if self._vacant:
            account.owner_index = self._vacant.pop()
            self.accounts[account.owner_index] = account
        else:
            account.owner_index = len(self.accounts)
            self.accounts.append(account)
        return account.owner_index

    def _sweep(self) -> None:
        """Find the places that no block points to; the next sweep waits until the table has doubled."""
        counted = np.bincount(self.indices, minlength=len(self.accounts))
        self._vacant = [index for index in np.flatnonzero(counted == 0).tolist() if index > UNKNOWN_INDEX]
        for index in self._vacant:
            self.accounts[index] = self.nobody
        self._sweep_at = 2 * (len(self.accounts) - len(self._vacant)) + _VACANT_SLACK
