"""One worker as the cache sees it: its ledger, trees, quotas, leases and fences.

    WINDOW --all named sessions are back, or time is up--> CLOSING --acknowledged--> OPEN
       ^ after a restart of the cache (rule 3)                                         ^ a new pool starts here

Only an OPEN worker grants. In the other phases whatever is given back drains until the window's fence is acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from coppice.ids import DomainId, LeaseId, Namespace, SchedulerEpoch, WorkerEpoch
from coppice.messages.index import WorkerInfo
from coppice.messages.registration import Fence, Register
from coppice_cache.core.errors import OpRefused
from coppice_cache.core.leases import Lease
from coppice_cache.core.ledger import BlockState, Ledger, unpack_blocks
from coppice_cache.core.quotas import DomainUse, EvictionPlan, Quotas
from coppice_cache.core.radix import Node, Tree
from coppice_cache.core.settings import DomainConfig

_CHUNK_BLOCKS = 8  # taken from one domain before asking again which one is furthest over its guarantee


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


class Worker:
    """All state of one worker epoch."""

    def __init__(
        self, message: Register, epoch: WorkerEpoch, ledger: Ledger, quotas: Quotas, *, phase: Phase, now_ns: int
    ) -> None:
        self.worker_id = message.worker_id
        self.epoch = epoch
        self.address = message.address
        self.num_blocks = message.num_blocks
        self.block_size = message.block_size
        self.block_bytes = message.block_size * 4
        self.namespace = message.namespace
        self.model = message.model
        self.draining = message.draining
        self.limits = (message.max_sequences, message.max_step_tokens, message.max_context)
        self.ledger = ledger
        self.quotas = quotas
        self.phase = phase
        self.window = Window((), now_ns)
        self.trees: dict[tuple[DomainId, Namespace], Tree] = {}
        self.num_nodes = 0
        self.leases: dict[int, Lease] = {}
        self.holders: dict[int, dict[int, Lease]] = {}  # block -> re-attached leases on it, by number
        self.fences: dict[int, PendingFence] = {}
        self.to_fence: list[Lease] = []  # drained, to be named in the next lease fence
        self.last_heard_ns = now_ns
        self.published: deque[tuple[int, bytes]] = deque()  # lately: when, and which handles
        self.mean_hold_ms = 1_000.0

    @property
    def is_open(self) -> bool:
        return self.phase is Phase.OPEN

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
        )

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def use_of(self, config: DomainConfig, domains_max: int) -> DomainUse:
        """The domain's account. Raises OpRefused when there are too many domains that hold something."""
        uses = self.quotas.uses
        if config.domain not in uses and len(uses) >= domains_max:
            self.quotas.forget_idle()
            if len(uses) >= domains_max:
                raise OpRefused(f"worker {self.worker_id!r} serves its maximum of {len(uses)} domains")
        return self.quotas.use_of(config)

    # pins

    def pin(self, lease: Lease, node: Node) -> None:
        lease.use.protected += node.pin(lease.number)
        lease.node = node

    def unpin(self, lease: Lease, node: Node) -> None:
        lease.use.protected -= node.unpin(lease.number)
        self.offer(lease.use, node)

    def offer(self, use: DomainUse, node: Node) -> None:
        """Something that protected the node may be gone: an orphan is freed then, others may be evicted from now on."""
        while node.is_orphan and not node.guards and not node.children:
            assert node.parent is not None
            parent = node.parent
            for block in unpack_blocks(node.leave(self.block_bytes)):
                self.ledger.put_free(block)
            self.num_nodes -= 1
            node = parent
        use.queue.offer(node)
        self.drop_if_unused(node)

    def remember_publication(self, handles: bytes, now_ns: int, ttl_ns: int) -> None:
        """Kept for a worker's time to live: a report that was on its way meanwhile does not show these blocks yet."""
        self.published.append((now_ns, handles))
        while self.published[0][0] < now_ns - ttl_ns:
            self.published.popleft()

    # eviction

    def make_room(self, use: DomainUse, plan: EvictionPlan) -> None:
        """Carry out a plan that was decided for this domain; it cannot fail."""
        self._evict(use, plan.from_own)
        wanted = plan.from_pool
        while wanted:
            victim = self.quotas.furthest_over()
            if victim is None:
                self._evict(use, wanted)
                return
            count = min(wanted, victim.lendable, _CHUNK_BLOCKS)
            self._evict(victim, count)
            wanted -= count

    def _evict(self, use: DomainUse, count: int) -> None:
        """Free cached blocks of one domain: coldest leaf first, its tail block by block."""
        use.evicted_blocks += count
        while count:
            node = use.queue.coldest()
            parent, taken = node.parent, min(count, node.num_blocks)
            assert parent is not None
            for block in unpack_blocks(node.trim(taken, self.block_bytes)):
                self.ledger.put_free(block)
            count -= taken
            if not node.handles:
                self.num_nodes -= 1
                use.queue.offer(parent)
                self.drop_if_unused(parent)
        self.quotas.settle(use)

    def drop_if_unused(self, node: Node) -> None:
        """Forget a tree that has neither nodes nor leases."""
        if isinstance(node, Tree) and node.is_unused:
            self.trees.pop((node.domain, node.namespace), None)

    # the end of leases

    def finish(self, lease: Lease) -> None:
        """The lease is over and nothing of it runs: take its pin and its blocks."""
        assert not lease.draining or all(
            self.ledger.state[block] == BlockState.DRAINING for block in lease.own_blocks()
        )
        if lease.tree is not None:
            self.unpin(lease, lease.node)
        for block in lease.own_blocks():
            self._give_back(block)
        for block in lease.held:
            del self.holders[block][lease.number]
            self._settle_held(block)
        del self.leases[lease.number]
        lease.use.leases -= 1
        self.quotas.settle(lease.use)

    def drain(self, lease: Lease) -> None:
        """The holder's word is missing: blocks wait for a fence, the pin stays as a drain pin (rule 7)."""
        assert not lease.draining
        lease.draining = True
        for block in lease.own_blocks():
            self.ledger.drain(block)
        for block in lease.held:
            self._settle_held(block)
        self.quotas.settle(lease.use)

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
        for block, generation in zip(lease.held, generations, strict=True):
            self.ledger.adopt(block, generation, lease.use)
            self.holders.setdefault(block, {})[lease.number] = lease
        self.leases[lease.number] = lease
        lease.use.leases += 1
        lease.use.reattached_peak = max(lease.use.reattached_peak, lease.use.held)
        self.quotas.settle(lease.use)

    def open_ledger(self) -> None:
        """The window's fence was acknowledged: what drains without a holder is free.

        Nothing was granted until now, so every block of every lease has its holders on record.
        """
        self.phase = Phase.OPEN
        for block in range(self.num_blocks):
            if self.ledger.state[block] == BlockState.DRAINING and block not in self.holders:
                self.ledger.put_free(block)
        for use in self.quotas.uses.values():
            self.quotas.settle(use)
