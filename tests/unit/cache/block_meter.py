"""Adds block time up the plain way: after each call of a core, what its ledgers say, times how long that lasts.

It reads states and owners block by block, so it shares nothing with what it checks but the ledger's columns and when
calls were made.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import proxy

import numpy as np

from coppice.compiled import is_compiled
from coppice.ids import WorkerEpoch
from coppice_cache.core.base.events import Tier
from coppice_cache.core.base.settings import Mode
from coppice_cache.core.base.statements import PoolStatement
from coppice_cache.core.index import IndexCore
from coppice_cache.core.pool.store import BlockStore

STATES = ("free", "leased", "cached", "draining")
Counts = dict[tuple[str, str], float]  # (domain, what) -> blocks, or blocks times nanoseconds
PoolId = tuple[WorkerEpoch, Tier]


class BlockMeter:
    """Of a core from its source. Nobody can stand before the methods of a compiled one: nothing is added up there."""

    def __init__(self, core: IndexCore) -> None:
        if is_compiled("coppice_cache"):
            return
        self.core = proxy(core)  # the core holds this: a cycle would keep what tests expect to be gone
        self.sums: dict[PoolId, Counter[tuple[str, str]]] = {}
        self.ended: dict[Tier, Counter[tuple[str, str]]] = {}
        self._now_ns = core.state.call_time.now_ns
        self._counts: dict[PoolId, Counts] = {}
        core._flush = self._flush_and_observe  # type: ignore[method-assign]
        self._observe()

    def _flush_and_observe(self) -> None:
        IndexCore._flush(self.core)
        self._observe()

    def _observe(self) -> None:
        now_ns = self.core.state.call_time.now_ns
        self._add(self.sums, now_ns - self._now_ns)
        self._now_ns = now_ns
        self._counts = {pool: counts_of(store) for pool, store in self._stores().items()}
        for pool in self.sums.keys() - self._counts.keys():
            self.ended.setdefault(pool[1], Counter()).update(self.sums.pop(pool))

    def _add(self, sums: dict[PoolId, Counter[tuple[str, str]]], elapsed_ns: int) -> None:
        for pool, counts in self._counts.items():
            found = sums.setdefault(pool, Counter())
            for key, count in counts.items():
                found[key] += count * elapsed_ns  # type: ignore[assignment]

    def _stores(self) -> dict[PoolId, BlockStore]:
        stores: dict[PoolId, BlockStore] = {}
        for worker in self.core.state.workers.values():
            stores |= {(worker.epoch, tier): store for tier, store in zip(Tier, worker.stores, strict=False)}
        return stores

    def is_of(self, core: IndexCore) -> bool:
        """False once a test has put another core in place of this one."""
        if is_compiled("coppice_cache"):
            return True
        return core._flush == self._flush_and_observe

    def compare(self, later_ns: int = 0) -> None:
        """The core's statement is what was added up, to the nanosecond, so many nanoseconds after the last call too."""
        if is_compiled("coppice_cache"):
            return
        statement = self.core.statement(self._now_ns + later_ns)
        sums = {pool: Counter(found) for pool, found in self.sums.items()}
        self._add(sums, later_ns)
        for found in statement.pools:
            _compare(found, sums.get((found.worker_epoch, found.tier), Counter()))
        assert {found.tier for found in statement.ended} >= {tier for tier, ended in self.ended.items() if ended}
        for found in statement.ended:
            _compare(found, self.ended.get(found.tier, Counter()))


def counts_of(store: BlockStore) -> Counts:
    """As they are now; what is lent goes to the lenders by what each has idle."""
    ledger, counts = store.ledger, Counter[tuple[str, str]]()
    for index, states in enumerate(_tallies(store)):
        domain = ledger.owners.accounts[index].config.domain
        for state, count in zip(STATES, states, strict=True):
            counts["" if state == "free" else domain, state] += count
    guaranteed = idle = borrowed = 0
    idle_of: dict[str, int] = {}
    for domain, account in store.quotas.accounts.items():
        guarantee = account.config.guarantee_of(store.num_blocks)
        held = sum(counts[domain, state] for state in STATES[1:])
        guaranteed += guarantee
        borrowed += max(0, held - guarantee)
        if account.config.mode is not Mode.STRICT:
            idle_of[domain] = max(0, guarantee - held)
        counts[domain, "guaranteed"] = guarantee
        counts[domain, "borrowed"] = max(0, held - guarantee)
    idle = sum(idle_of.values())
    lent = max(0, min(idle, borrowed - (store.num_blocks - guaranteed)))
    shares = {(domain, "lent"): lent * mine / idle for domain, mine in idle_of.items() if idle}
    return {**counts, **shares}


def _tallies(store: BlockStore) -> list[list[int]]:
    """By owner, by state."""
    owners = store.ledger.owners
    both = owners.indices.astype(np.int64) * len(STATES) + store.ledger.states
    tallies: list[list[int]] = (
        np.bincount(both, minlength=len(STATES) * len(owners.accounts)).reshape(-1, len(STATES)).tolist()
    )
    return tallies


def _compare(found: PoolStatement, sums: Counter[tuple[str, str]]) -> None:
    told: dict[tuple[str, str], Any] = {("", "free"): found.time.free_block_ns}
    told |= {("\0unknown", state): 0 for state in STATES[1:]}
    told["\0unknown", "draining"] = found.time.unclaimed_block_ns
    for domain in found.domains:
        for what in (*STATES[1:], "guaranteed", "borrowed", "lent"):
            told[domain.domain, what] = getattr(domain, f"{what}_block_ns")
    for key in told.keys() | sums.keys():
        slack = 2 + abs(sums[key]) * 1e-9 if key[1] == "lent" else 0
        assert abs(told.get(key, 0) - sums[key]) <= slack, (found.tier, key, told.get(key), sums[key])
    whole = found.time.free_block_ns + found.time.unclaimed_block_ns
    assert whole + sum(domain.held_block_ns for domain in found.domains) == found.time.pool_block_ns
    if found.worker_id:
        assert found.time.pool_block_ns == found.num_blocks * found.elapsed_ns
