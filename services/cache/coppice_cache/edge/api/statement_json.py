"""Statements as JSON. Block times are whole numbers, which may be above 2^53: as floats their first 15 digits hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from coppice_cache.core.base.statements import DomainStatement, PoolStatement, Statement, total


def statement_json(found: Statement) -> dict[str, Any]:
    return {
        "cache_epoch": found.cache_epoch,
        "elapsed_ns": found.elapsed_ns,
        "totals": [_sum_json(pool) for pool in total((*found.pools, *found.ended))],
        "pools": [_pool_json(pool) for pool in found.pools],
        "ended": [_sum_json(pool) for pool in found.ended],
    }


def _pool_json(pool: PoolStatement) -> dict[str, Any]:
    named = ("worker_id", "worker_epoch", "num_blocks", "elapsed_ns")
    return {**{name: getattr(pool, name) for name in named}, **_sum_json(pool)}


def _sum_json(pool: PoolStatement) -> dict[str, Any]:
    return {
        "tier": pool.tier.name.lower(),
        "num_epochs": pool.num_epochs,
        **asdict(pool.time),
        "domains": [_domain_json(domain) for domain in sorted(pool.domains, key=lambda domain: domain.domain)],
    }


def _domain_json(domain: DomainStatement) -> dict[str, Any]:
    return {**asdict(domain), "held_block_ns": domain.held_block_ns}
