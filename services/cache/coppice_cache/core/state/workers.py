"""One worker as the cache sees it: its ledger, trees, quotas, leases, fences and the tiers below its device.

    WINDOW --all named sessions are back, or time is up--> CLOSING --acknowledged--> OPEN
       ^ after a restart of the cache (rule 3)                                         ^ a new pool starts here

Only an OPEN worker grants. In the other phases whatever is given back drains until the window's fence is acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

from coppice.handles import HANDLE_BYTES
from coppice.ids import LeaseId, SchedulerEpoch, WorkerEpoch
from coppice.messages.index import WorkerInfo
from coppice.messages.registration import CopyOrder, Direction, Fence, Register
from coppice_cache.core.base.errors import OpRefused
from coppice_cache.core.base.events import IndexEvent
from coppice_cache.core.base.settings import DomainConfig, TierCosts
from coppice_cache.core.pool.changes import Changes
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.ledger import BlockState, Ledger
from coppice_cache.core.pool.quotas import Account, Quotas
from coppice_cache.core.pool.reservations import Reservations
from coppice_cache.core.pool.store import BlockStore, HeldPin
from coppice_cache.core.radix.incarnations import Incarnations
from coppice_cache.core.radix.tree import Node
from coppice_cache.core.state.single_flight import Flights, Waiter


@dataclass(slots=True, eq=False)
class CopyJob:
    """One order under way: `source` pins what is read, `target` owns what is written from its `num_settled` on."""

    order: CopyOrder
    source: Lease
    target: Lease
    tokens: bytes  # of the blocks that are copied
    is_late: bool = False  # somebody waited for it too long


_TRIAL_NS = 60 * 10**9
_BURST_KEPT = 0.98  # of the largest burst, per tick: a few seconds


class LowerTier:
    """A store below another one of the same worker, all copies between the two in either direction, and how much goes
    down ahead of need."""

    def __init__(
        self,
        store: BlockStore,
        upper: BlockStore,
        costs: TierCosts,
        *,
        down: Direction,
        up: Direction,
        rest_ms: int = 0,
    ) -> None:
        self.store = store
        self.upper = upper
        self.costs = costs
        self.expected_copy_us = costs.copy_us_per_block
        self.down = down  # how orders from the upper store to this one name it
        self.up = up
        self.rest_ms = rest_ms  # in which nothing goes that way, after a copy has failed and the content was right
        self.rests_until_ns = 0  # on the way down
        self.keeps_until_ns = 0  # on the way up
        self.tried_ns = dict.fromkeys((down, up), 0)  # when the last copy was ordered
        self.jobs: dict[int, CopyJob] = {}
        self.burst = 0.0  # most blocks that were evicted above between two ticks lately
        self.look_at = 1  # of the upper `num_evicted`: from there on victims are looked at before the next tick
        self.is_short = False  # there were more to copy than may be under way
        self.num_copied = dict.fromkeys((down, up), 0)  # blocks that copies brought to the other store so far
        self._ticked_at = 0

    def costs_of(self, direction: Direction, now_ns: int) -> TierCosts:
        """By which a copy is worth it: what was measured, or, once in a while, what is expected if that is less. Copies
        that were slow would else be the last ones, and nothing would be measured again."""
        if self.costs.copy_us_per_block <= self.expected_copy_us or now_ns < self.tried_ns[direction] + _TRIAL_NS:
            return self.costs
        return replace(self.costs, copy_us_per_block=self.expected_copy_us)

    def gives(self, now_ns: int) -> bool:
        """Whether whoever asks should wait for copies from here."""
        return now_ns >= self.keeps_until_ns and not any(job.is_late for job in self.jobs.values())

    def note_late(self, leaders: set[int]) -> None:
        """By their lease numbers, flights that somebody waited for too long."""
        for job in self.jobs.values():
            job.is_late |= job.target.number in leaders

    def ticked(self) -> None:
        """The upper store's count of evictions only grows."""
        num_evicted = self.upper.num_evicted
        self.burst = max(num_evicted - self._ticked_at, self.burst * _BURST_KEPT)
        self._ticked_at = num_evicted

    def copying(self, direction: Direction, *, but_for: Account | None = None) -> tuple[int, int]:
        """Orders under way in that direction, and their blocks, but for those whose source is this account's."""
        sizes = [
            len(job.order.src)
            for job in self.jobs.values()
            if job.order.direction is direction and job.source.account is not but_for
        ]
        return len(sizes), sum(sizes) // HANDLE_BYTES


class Phase(Enum):
    WINDOW = "window"
    CLOSING = "closing"
    OPEN = "open"


@dataclass(slots=True)
class PendingFence:
    """A fence that was not acknowledged yet, and the leases that end with it."""

    message: Fence
    leases: list[Lease] = field(default_factory=list)


@dataclass(slots=True)
class Window:
    """Re-attachment after a restart."""

    named: tuple[SchedulerEpoch, ...]
    deadline_ns: int
    fence_id: int = 0  # of the window's fence, once it was sent
    lease_ids: set[LeaseId] = field(default_factory=set)  # refused claims: may still run, so the fence names them
    displaced: list[Lease] = field(default_factory=list)  # lost a block to a higher generation


class Worker(BlockStore):
    """All state of one worker epoch; the store is that of its device."""

    def __init__(
        self,
        message: Register,
        epoch: WorkerEpoch,
        ledger: Ledger,
        quotas: Quotas,
        *,
        phase: Phase,
        now_ns: int,
        woken: list[Waiter],
        incarnations: Incarnations,
        events: list[IndexEvent] | None,
    ) -> None:
        changes = Changes(message.worker_id, epoch, events)
        super().__init__(message.block_size, ledger, quotas, incarnations, changes)
        self.worker_id = message.worker_id
        self.epoch = epoch
        self.address = message.address
        self.namespace = message.namespace
        self.model = message.model
        self.draining = message.draining
        self.owner = SchedulerEpoch(0)  # the session that plans here; see `ownership`
        self.yields = False  # its owner was asked to let it go
        self.knows_owners = message.knows_owners  # False: it takes plans of the newest session that attaches
        self.limits = (message.max_sequences, message.max_step_tokens, message.max_context)
        self.phase = phase
        self.window = Window((), now_ns)
        self.leases: dict[int, Lease] = {}
        self.holders: dict[int, dict[int, Lease]] = {}  # block -> re-attached leases on it, by number
        self.fences: dict[int, PendingFence] = {}
        self.num_fences = 0  # that were sent so far
        self.to_fence: list[Lease] = []  # drained, to be named in the next lease fence
        self.last_heard_ns = now_ns
        self.published: deque[tuple[int, bytes]] = deque()  # lately: when, and which handles
        self.mean_hold_ms = 1_000.0
        self.flights = Flights(self.block_bytes, woken)
        self.reservations = Reservations(quotas, ledger)
        self.lower_tiers: tuple[LowerTier, ...] = ()  # from the device down: the host's, and a disk's below that
        self.kept_from = WorkerEpoch(0)  # the epoch that what is on the disk was of; 0: the pool began with this one
        self.pins: dict[str, HeldPin] = {}  # by name; see `pins`

    @property
    def is_open(self) -> bool:
        return self.phase is Phase.OPEN

    def add_below(self, tier: LowerTier) -> None:
        self.lower_tiers = (*self.lower_tiers, tier)

    @property
    def stores(self) -> tuple[BlockStore, ...]:
        """Of all tiers. Not kept: what refers to itself is only freed by the cyclic collector."""
        return (self, *[tier.store for tier in self.lower_tiers])

    def leave(self) -> list[Node]:
        """It is over: what its trees hang from, in all tiers."""
        roots = [root for store in self.stores for root in store.roots()]
        self.lower_tiers = ()  # which refer to it
        return roots

    @property
    def host(self) -> LowerTier | None:
        return self.lower_tiers[0] if self.lower_tiers else None

    @property
    def disk(self) -> LowerTier | None:
        return self.lower_tiers[1] if len(self.lower_tiers) > 1 else None

    @property
    def info(self) -> WorkerInfo:
        max_sequences, max_step_tokens, max_context = self.limits
        return WorkerInfo(
            worker_id=self.worker_id,
            worker_epoch=self.epoch,
            address=self.address,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            namespace=self.namespace,
            model=self.model,
            open=self.is_open,
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            max_context=max_context,
            draining=self.draining,
            num_host_blocks=0 if self.host is None else self.host.store.num_blocks,
        )

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def may_get_room(self) -> bool:
        """Whether anything could come back that is not to be had now. If not, what is kept from a domain is what the
        others are guaranteed, and no wait helps."""
        draining = self.ledger.counts[BlockState.DRAINING]
        protected = any(account.protected for account in self.quotas.accounts.values())
        return bool(self.leases or self.copying or draining or protected or self.reservations.waiting)

    def use_of(self, config: DomainConfig, domains_max: int) -> Account:
        """The domain's account. Raises OpRefused when there are too many domains that hold something."""
        if not self.quotas.makes_place(config.domain, domains_max):
            raise OpRefused(f"worker {self.worker_id!r} serves its maximum of {domains_max} domains")
        return self.quotas.use_of(config)

    def end_copy(self, lease: Lease) -> None:
        """The copy that the grant offered was made, or never will be."""
        if lease.copy_node is not None:
            node, lease.copy_node = lease.copy_node, None
            self.unpin(lease, node)

    def remember_publication(self, handles: bytes, now_ns: int, ttl_ns: int) -> None:
        """Kept for a worker's time to live: a report that was on its way meanwhile does not show these blocks yet."""
        self.published.append((now_ns, handles))
        while self.published[0][0] < now_ns - ttl_ns:
            self.published.popleft()

    def all_leases(self) -> Iterator[Lease]:
        yield from self.leases.values()
        yield from self.copying.values()

    def all_pins(self) -> Iterator[HeldPin]:
        yield from self.pins.values()

    # the end of leases

    def finish(self, lease: Lease) -> None:
        """The lease is over and nothing of it runs: take its pin and its blocks."""
        self.flights.end(lease)
        self.end_copy(lease)
        if lease.tree is not None:
            self.unpin(lease, lease.node)
        own = lease.own_handles()
        if self.is_open:
            self.ledger.give_back(lease.account, own, drained=lease.draining)
        elif not lease.draining:
            self.ledger.drain_all(lease.account, own)
        for block in lease.held:
            del self.holders[block][lease.number]
            self._settle_held(block)
        del self.leases[lease.number]
        lease.account.leases -= 1
        self.quotas.refresh(lease.account)

    def drain(self, lease: Lease) -> None:
        """The holder's word is missing: blocks wait for a fence, the pin stays as a drain pin (rule 7)."""
        assert not lease.draining
        lease.draining = True
        self.flights.end(lease)
        self.ledger.drain_all(lease.account, lease.own_handles())
        for block in lease.held:
            self._settle_held(block)
        self.quotas.refresh(lease.account)

    def _give_back(self, block: int) -> None:
        if self.is_open:
            self.ledger.put_free(block)
        else:
            self.ledger.drain(block)

    def _settle_held(self, block: int) -> None:
        holders = self.holders[block]
        if not holders:
            del self.holders[block]
            self._give_back(block)
        elif all(holder.draining for holder in holders.values()):
            self.ledger.drain(block)
        else:
            self.ledger.undrain(block)

    # the window after a restart

    def adopt(self, lease: Lease, generations: Iterable[int]) -> None:
        """Take a re-attached lease in; its claims were judged and displaced ones are gone."""
        touched = {lease.account: None}  # and those whose claims were displaced, who hold less now
        for block, generation in zip(lease.held, generations, strict=True):
            touched[self.ledger.adopt(block, generation, lease.account)] = None
            self.holders.setdefault(block, {})[lease.number] = lease
        self.leases[lease.number] = lease
        lease.account.leases += 1
        lease.account.reattached_peak = max(lease.account.reattached_peak, lease.account.held)
        for account in touched:
            if account is not self.ledger.owners.unknown:
                self.quotas.refresh(account)
