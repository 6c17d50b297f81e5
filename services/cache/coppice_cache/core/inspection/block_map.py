"""What every block of one pool is now, for a picture of it.

    columns    state (1 byte) and last owner (4 bytes) of each block, copied while nothing may change
    cells      u16 of each block, made of them afterwards: 0 is free, else 4 * (place in `domains` + 1) + state
    runs       the cells once more, as (length, cell): most pools are few runs

Copying a column is one call of numpy; everything that takes longer is a method of the copy, which nobody changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coppice.ids import DomainId, WorkerEpoch, WorkerId
from coppice_cache.core.base.events import Tier
from coppice_cache.core.pool.ledger import BlockState
from coppice_cache.core.pool.quotas import Account
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.state.state import State
from coppice_cache.core.state.workers import LowerTier

DOMAINS_MAX = 1_024  # that are told apart; of more, those that hold least share the last place
OTHERS = DomainId("\0others")
_STATES = len(BlockState)

Cells = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class DomainOnMap:
    """One domain of the pool; its place in `BlockMap.domains` is in the cells of its blocks."""

    domain: DomainId
    leased_blocks: int
    cached_blocks: int
    draining_blocks: int
    pinned_blocks: int
    guarantee_blocks: int
    maximum_blocks: int
    evicted_blocks: int  # so far, like the next one
    fenced_leases: int


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A copy of one pool's books. `num_promoting` and `num_demoting` are blocks that copies write, between device and
    host, or of a disk between host and disk."""

    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    block_size: int
    num_blocks: int
    open: bool
    fences: int  # that were not acknowledged yet
    num_promoting: int
    num_demoting: int
    total_fences: int  # so far, like the next two
    total_promoted: int  # blocks that came up
    total_demoted: int
    domains: tuple[DomainOnMap, ...]
    places: tuple[int, ...]  # in `domains`, by index of the owner
    states: bytes  # u8 of each block
    owners: bytes  # i32 of each block: index of the domain that had it last

    def cells(self) -> Cells:
        """Shape [num_blocks]."""
        states = np.frombuffer(self.states, np.uint8)
        bases = (np.array(self.places, np.uint16) + np.uint16(1)) * np.uint16(_STATES)
        cells: Cells = bases[np.frombuffer(self.owners, np.int32)] + states
        cells[states == BlockState.FREE] = 0
        return cells

    def runs(self) -> tuple[npt.NDArray[np.uint32], Cells]:
        """Lengths, which add up to `num_blocks`, and the cell that all blocks of a run have."""
        cells = self.cells()
        starts = np.concatenate(([0], np.flatnonzero(cells[1:] != cells[:-1]) + 1))
        return np.diff(starts, append=len(cells)).astype(np.uint32), cells[starts]


def copy_map(state: State, worker_id: WorkerId, tier: Tier) -> BlockMap | None:
    """The pool of one tier of a worker; None: there is none. Cost: two copies of columns, 5 bytes per block, and a
    step for each domain that left something there."""
    worker = state.workers.get(worker_id)
    if worker is None or tier >= len(worker.stores):
        return None
    store = worker.stores[tier]
    domains, places = _domains(store)
    lower = worker.disk if tier is Tier.DISK else worker.host
    ways = (0, 0, 0, 0) if lower is None else _copied(lower)
    promoting, demoting, promoted, demoted = ways
    return BlockMap(
        worker_id=worker.worker_id,
        worker_epoch=worker.epoch,
        block_size=worker.block_size,
        num_blocks=store.num_blocks,
        open=worker.is_open,
        fences=len(worker.fences),
        num_promoting=promoting,
        num_demoting=demoting,
        total_fences=worker.num_fences,
        total_promoted=promoted,
        total_demoted=demoted,
        domains=domains,
        places=places,
        states=store.ledger.states.tobytes(),
        owners=store.ledger.owners.indices.tobytes(),
    )


def _domains(store: BlockStore) -> tuple[tuple[DomainOnMap, ...], tuple[int, ...]]:
    """All that hold something or are guaranteed something, and for each owner the place of its domain."""
    accounts = store.ledger.owners.accounts
    shown = {id(account): account for account in (*accounts, *store.quotas.accounts.values())}
    listed = [account for account in shown.values() if account.held or account.guarantee]
    if len(listed) >= DOMAINS_MAX:
        listed = sorted(listed, key=lambda account: -account.held)[: DOMAINS_MAX - 1]
    listed.sort(key=lambda account: account.config.domain)
    domains = [_together(account.config.domain, (account,)) for account in listed]
    place_of = {id(account): place for place, account in enumerate(listed)}
    missing = [account for account in accounts if account.held and id(account) not in place_of]
    if missing:
        domains.append(_together(OTHERS, missing))
    last = max(0, len(domains) - 1)
    return tuple(domains), tuple(place_of.get(id(account), last) for account in accounts)


def _together(domain: DomainId, accounts: Sequence[Account]) -> DomainOnMap:
    return DomainOnMap(
        domain=domain,
        leased_blocks=sum(account.leased for account in accounts),
        cached_blocks=sum(account.cached for account in accounts),
        draining_blocks=sum(account.draining for account in accounts),
        pinned_blocks=sum(account.protected for account in accounts),
        guarantee_blocks=sum(account.guarantee for account in accounts),
        maximum_blocks=sum(account.maximum for account in accounts),
        evicted_blocks=sum(account.evicted_blocks for account in accounts),
        fenced_leases=sum(account.fenced_leases for account in accounts),
    )


def _copied(lower: LowerTier) -> tuple[int, int, int, int]:
    """Blocks on their way up, and down; and those that came so far."""
    up, down = lower.up, lower.down
    return lower.copying(up)[1], lower.copying(down)[1], lower.num_copied[up], lower.num_copied[down]
