"""All invariants of a state, looked at in small steps; other calls of the core may come between any two of them.

    blocks   remember state and generation of each
    leases   each by itself; mark the blocks that it owns
    trees    each node by itself, parents first; mark the blocks of its edge
    hidden   what left a tree while we walked
    ledger   a block that is as it was in the beginning was so all the time, so somebody must have marked it
    pins     per domain: from its leases to pins, guards and protected blocks
    sums     per domain

Each step sees one moment, so what it compares within itself needs no care. Between steps only marks are carried over,
and a mark says more than it seems: generations never repeat and no state comes back under the same generation, so a
block with the state and generation of before has not moved meanwhile. What moved is not judged, it is right or wrong
in the next audit; what did not move is judged as if nothing had happened. Nodes are looked up under their parent's key
when their turn comes, like in `snapshots`: an edge that was split meanwhile starts with the same key.

The number of nodes is a sum over a whole walk; it is judged only if nothing at all moved in its store. That is always
so when all steps are taken at once, and so are the blocks of a ledger that has not opened yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from coppice.ids import LeaseId
from coppice.messages.index import lease_hash
from coppice_cache.core.base.events import Tier
from coppice_cache.core.inspection import check
from coppice_cache.core.inspection.audit_walk import Marks, Queues, TreeWalk
from coppice_cache.core.inspection.check import require
from coppice_cache.core.pool.quotas import Account
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.tree import Node
from coppice_cache.core.state.sessions import Session
from coppice_cache.core.state.state import State
from coppice_cache.core.state.workers import Worker

_FEW = 128  # sessions' leases, leases, holders per step
_LEASES_PER_STEP = 512  # whose pins are compared in one step, unless one domain has more
_BLOCKS_PER_STEP = 1 << 17

T = TypeVar("T")


@dataclass(slots=True)
class Looked:
    """What an audit has seen so far, and what it is at."""

    blocks: int = 0
    nodes: int = 0
    leases: int = 0
    stage: str = ""


def check_state(state: State) -> None:
    """Everything at once. Raises InvariantBroken."""
    for _ in audit(state, Looked()):
        pass


def audit(state: State, looked: Looked) -> Iterator[None]:
    """Each step takes some hundred microseconds, with few exceptions. Raises InvariantBroken."""
    for session in list(state.sessions.values()):
        looked.stage = f"session {session.epoch}"
        for _ in _audit_session(state, session):
            yield
            if state.sessions.get(session.epoch) is not session:
                break
    for worker in list(state.workers.values()):
        for _ in _audit_worker(state, worker, looked):
            yield
            if state.workers.get(worker.worker_id) is not worker:
                break  # its epoch is over


def chunks(things: Iterable[T], size: int) -> Iterator[list[T]]:
    """Of a list that is ours."""
    iterator = iter(things)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _audit_session(state: State, session: Session) -> Iterator[None]:
    ids, digest = [*session.leases, *session.claims], session.digest
    listed = list(session.leases.items())
    for chunk in chunks(ids, _FEW):
        for lease_id in chunk:
            digest ^= lease_hash(LeaseId(lease_id))
        yield
    require(digest == 0, "I2", f"digest of session {session.epoch}")
    for pairs in chunks(listed, _FEW):
        for lease_id, lease in pairs:
            if session.leases.get(lease_id) is lease:
                worker = session.workers[lease_id]
                known = worker.leases.get(lease.number) is lease and state.workers.get(worker.worker_id) is worker
                require(known and not lease.draining, "I2", f"session {session.epoch} lists lease {lease_id.hex()}")
        yield


def _audit_worker(state: State, worker: Worker, looked: Looked) -> Iterator[None]:
    for tier, store in zip(Tier, worker.stores, strict=False):
        for _ in _StoreAudit(state, worker, store, looked).stages():
            looked.stage = f"{tier.name.lower()} of worker {worker.worker_id}"
            yield
    check.check_flights(state, worker)
    yield
    worker.reservations.check()
    yield


class _StoreAudit:
    """One tier of one worker."""

    def __init__(self, state: State, worker: Worker, store: BlockStore, looked: Looked) -> None:
        self.state = state
        self.worker = worker
        self.store = store
        self.looked = looked
        self.marks = Marks(store.ledger)
        self.queues = Queues(store)
        self.walk = TreeWalk(store, self.marks, self.queues)
        self._began = self._moves()

    def stages(self) -> Iterator[None]:
        yield from self._remember_blocks()
        yield from self._check_leases()
        yield from self._check_trees()
        yield from self._check_ledger()
        yield from self._check_pins()
        yield from self._check_accounts()

    def _moves(self) -> tuple[int, int]:
        """Equal to what it was before: nothing has changed in this store since."""
        return self.store.quotas.num_settled, self.store.num_nodes

    @property
    def _stood_still(self) -> bool:
        return self._moves() == self._began

    def _block_ranges(self) -> Iterator[slice]:
        for start in range(0, self.store.num_blocks, _BLOCKS_PER_STEP):
            yield slice(start, min(start + _BLOCKS_PER_STEP, self.store.num_blocks))

    def _remember_blocks(self) -> Iterator[None]:
        for blocks in self._block_ranges():
            self.marks.remember(blocks)
            check.check_generations(self.store.ledger, blocks)
            yield

    def _check_leases(self) -> Iterator[None]:
        store, worker = self.store, self.worker
        if store is worker:
            for numbers in chunks(list(worker.leases), _FEW):
                fenced = check.fenced_numbers(worker)
                for number in numbers:
                    lease = worker.leases.get(number)
                    if lease is not None:
                        self.marks.own(check.check_lease(self.state, worker, lease, fenced), number)
                        self.looked.leases += 1
                yield
            for blocks in chunks(list(worker.holders), _FEW):
                for block in blocks:
                    if block in worker.holders:
                        check.check_holders(worker, block, worker.holders[block])
                        self.marks.own(np.array([block]), 0)
                yield
        for numbers in chunks(list(store.copying), _FEW):
            for number in numbers:
                lease = store.copying.get(number)
                if lease is not None:
                    self.marks.own(check.check_blocks(store, lease), number)
            yield

    def _check_trees(self) -> Iterator[None]:
        before = self.looked.nodes
        for _ in self.walk.steps():
            self.looked.nodes = before + self.walk.num_nodes
            yield
        self.looked.nodes = before + self.walk.num_nodes
        found, counted = self.walk.num_nodes, self.store.num_nodes
        if self._stood_still:
            require(found == counted, "I11", f"{counted} nodes are counted where {found} were found")

    def _check_ledger(self) -> Iterator[None]:
        ledger = self.store.ledger
        for blocks in self._block_ranges():
            self.marks.judge(blocks, is_open=self.store.is_open, stood_still=self._stood_still)
            self.looked.blocks += blocks.stop - blocks.start
            yield
        check.check_counts(ledger)
        yield
        check.check_free_list(ledger)
        yield

    def _check_pins(self) -> Iterator[None]:
        accounts: set[Account] = set()
        num_leases = 0
        for account in list(self.store.quotas.accounts.values()):
            accounts.add(account)
            num_leases += account.leases + 1
            if num_leases > _LEASES_PER_STEP:
                check.check_pins(self.store, accounts, self._guarded(accounts))
                accounts, num_leases = set(), 0
                yield
        check.check_pins(self.store, accounts, self._guarded(accounts))
        yield

    def _guarded(self, accounts: set[Account]) -> list[Node]:
        return [node for account in accounts for node in self.walk.guarded.pop(account.config.domain, ())]

    def _check_accounts(self) -> Iterator[None]:
        quotas, ledger = self.store.quotas, self.store.ledger
        for account in list(quotas.accounts.values()):
            if quotas.accounts.get(account.config.domain) is account:
                check.check_account(ledger, account)
                yield
                yield from self.queues.confirm(account)
        check.check_sums(quotas)
        yield
        check.check_block_time(ledger, quotas)
        yield
