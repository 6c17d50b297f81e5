"""What changed in the trees, in the order in which it changed.

Stored   blocks became findable (published, replayed, copied into a tier)
Removed  blocks left a tree or a tier (evicted, distrusted, reclaimed after an invalidation); with `all_below`, what
         hangs below them in that pool is unfindable too, and is removed one by one as it is reclaimed
Cleared  everything that matches is unfindable at once: a worker epoch died, a domain or a namespace was invalidated

Whoever applies them in order, ignoring what is unknown, has the same blocks as the trees: a handle carries its
generation, so no two occupancies of a block are ever mistaken for each other. `all_below` goes by seals, whether or not
the removed block itself is known: the same tokens may be stored again before what hung below is reclaimed, and then
only the order tells the old from the new. The core numbers the events without gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from coppice.ids import DomainId, Namespace, WorkerEpoch, WorkerId
from coppice.seals import NO_CHAIN_KEY, ChainKey


class Tier(IntEnum):
    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class Stored:
    """A run of blocks; `seals` and `handles` have one entry each, `tokens` whole blocks."""

    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    domain: DomainId
    namespace: Namespace
    parent_seal: bytes  # of the block before the first; b"" at the start of a prompt
    tokens: bytes
    handles: bytes
    seals: bytes
    tier: Tier = Tier.DEVICE
    chain_key: ChainKey = NO_CHAIN_KEY  # for the recovery log alone


@dataclass(frozen=True, slots=True)
class Removed:
    """`namespace` is empty where the tree of the blocks is gone already; the handles say which ones they are."""

    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    domain: DomainId
    namespace: Namespace
    handles: bytes
    seals: bytes
    tier: Tier = Tier.DEVICE
    all_below: bool = False


@dataclass(frozen=True, slots=True)
class Cleared:
    """Empty fields match everything: all of the worker epoch, all of a domain there, all of a namespace there."""

    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    domain: DomainId = DomainId("")
    namespace: Namespace = Namespace(b"")


IndexEvent = Stored | Removed | Cleared
