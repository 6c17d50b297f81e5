"""Statements of pools: of one that lives, and the sums of those that are over.

A worker epoch that ends (its worker said goodbye, was silent for too long or came back as another one) goes into the
sums with all that it had until then. So a domain's totals never fall while this incarnation lives, as long as no more
than `CLOSED_MAX` domains are in these sums; those that come later are in one sum without a name.
"""

from __future__ import annotations

from coppice_cache.core.base.events import Tier
from coppice_cache.core.base.statements import PoolStatement, PoolTime
from coppice_cache.core.pool.block_time import ClosedDomains
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.state.workers import Worker


def pool_statements(worker: Worker, now_ns: int) -> list[PoolStatement]:
    """Of each tier, until `now_ns`, which is not before the last call. Cost: its domains."""
    stores = zip(Tier, worker.stores, strict=False)
    return [_pool_statement(worker, tier, store, now_ns) for tier, store in stores]


def _pool_statement(worker: Worker, tier: Tier, store: BlockStore, now_ns: int) -> PoolStatement:
    ledger, block_time = store.ledger, store.ledger.block_time
    block_time.call_time.settle()
    domains = dict(block_time.closed.by_domain)
    for domain, account in store.quotas.accounts.items():
        found, before = block_time.of(account, now_ns), domains.get(domain)
        domains[domain] = found if before is None else before.plus(found)
    return PoolStatement(
        tier=tier,
        time=block_time.pool(ledger.owners.unknown, now_ns),
        domains=tuple(domains.values()),
        worker_id=worker.worker_id,
        worker_epoch=worker.epoch,
        num_blocks=store.num_blocks,
        elapsed_ns=now_ns - block_time.began_ns,
    )


class EndedWorkers:
    """Of each tier one sum, over all worker epochs that are over in this incarnation."""

    def __init__(self) -> None:
        self._sums: dict[Tier, _Sum] = {}

    def add(self, worker: Worker, now_ns: int) -> None:
        for found in pool_statements(worker, now_ns):
            self._sums.setdefault(found.tier, _Sum()).add(found)

    def statements(self) -> tuple[PoolStatement, ...]:
        return tuple(found.statement(tier) for tier, found in self._sums.items())


class _Sum:
    def __init__(self) -> None:
        self._time = PoolTime()
        self._domains = ClosedDomains()
        self._num_epochs = 0

    def add(self, found: PoolStatement) -> None:
        self._time = self._time.plus(found.time)
        self._num_epochs += 1
        for domain in found.domains:
            self._domains.add(domain)

    def statement(self, tier: Tier) -> PoolStatement:
        return PoolStatement(tier, self._time, tuple(self._domains.by_domain.values()), num_epochs=self._num_epochs)
