"""What operators see: counters and statements. Nothing here changes anything."""

from __future__ import annotations

from coppice_cache.core.base.results import DomainStats, IndexStats, WorkerStats
from coppice_cache.core.base.statements import Statement
from coppice_cache.core.pool.ledger import BlockState
from coppice_cache.core.pool.quotas import Account
from coppice_cache.core.state.state import State
from coppice_cache.core.state.statements import pool_statements
from coppice_cache.core.state.workers import Worker


def gather_stats(state: State) -> IndexStats:
    """Cost: workers times their domains."""
    workers = tuple(_worker_stats(worker) for worker in state.workers.values())
    domains = [domain for worker in workers for domain in worker.domains]
    return IndexStats(
        cache_epoch=state.cache_epoch,
        sessions=len(state.sessions),
        leases=sum(len(session.leases) for session in state.sessions.values()),
        pins=sum(worker.leases for worker in workers),
        nodes=sum(worker.nodes for worker in workers),
        free_blocks=sum(worker.free_blocks for worker in workers),
        leased_blocks=sum(worker.leased_blocks for worker in workers),
        cached_blocks=sum(worker.cached_blocks for worker in workers),
        draining_blocks=sum(worker.draining_blocks for worker in workers),
        hit_tokens=sum(domain.hit_tokens for domain in domains),
        query_tokens=sum(domain.query_tokens for domain in domains),
        evicted_blocks=sum(domain.evicted_blocks for domain in domains),
        workers=workers,
    )


def gather_statement(state: State, now_ns: int) -> Statement:
    """Until `now_ns`, or the last call where that was later."""
    now_ns = max(now_ns, state.call_time.now_ns)
    return Statement(
        cache_epoch=state.cache_epoch,
        elapsed_ns=now_ns - state.started_ns,
        pools=tuple(found for worker in state.workers.values() for found in pool_statements(worker, now_ns)),
        ended=state.ended.statements(),
    )


def _worker_stats(worker: Worker) -> WorkerStats:
    counts = worker.ledger.counts
    host, disk = (
        [0] * len(BlockState) if tier is None else tier.store.ledger.counts for tier in (worker.host, worker.disk)
    )
    return WorkerStats(
        worker_id=worker.worker_id,
        worker_epoch=worker.epoch,
        open=worker.is_open,
        num_blocks=worker.num_blocks,
        free_blocks=counts[BlockState.FREE],
        leased_blocks=counts[BlockState.LEASED],
        cached_blocks=counts[BlockState.CACHED],
        draining_blocks=counts[BlockState.DRAINING],
        leases=len(worker.leases),
        fences=len(worker.fences),
        trees=len(worker.trees),
        nodes=worker.num_nodes,
        domains=tuple(_domain_stats(worker, account) for account in worker.quotas.accounts.values()),
        num_host_blocks=sum(host),
        host_free_blocks=host[BlockState.FREE],
        host_leased_blocks=host[BlockState.LEASED],
        host_cached_blocks=host[BlockState.CACHED],
        num_disk_blocks=sum(disk),
        disk_free_blocks=disk[BlockState.FREE],
        disk_leased_blocks=disk[BlockState.LEASED],
        disk_cached_blocks=disk[BlockState.CACHED],
        copies=sum(len(tier.jobs) for tier in worker.lower_tiers),
        draining=worker.draining,
        owner=worker.owner,
    )


def _domain_stats(worker: Worker, account: Account) -> DomainStats:
    return DomainStats(
        worker_id=worker.worker_id,
        domain=account.config.domain,
        leased_blocks=account.leased,
        cached_blocks=account.cached,
        draining_blocks=account.draining,
        pinned_blocks=account.protected,
        guarantee_blocks=account.guarantee,
        maximum_blocks=account.maximum,
        leases=account.leases,
        hit_tokens=account.hit_tokens,
        query_tokens=account.query_tokens,
        evicted_blocks=account.evicted_blocks,
    )
