"""The host tier of a worker: its store, and the copies under way in either direction. What decides is in `offload`."""

from __future__ import annotations

from dataclasses import dataclass

from coppice.handles import HANDLE_BYTES
from coppice.messages.registration import CopyOrder
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.store import BlockStore


@dataclass(slots=True, eq=False)
class CopyJob:
    """One order under way: `source` pins what is read, `target` owns what is written from its `num_settled` on."""

    order: CopyOrder
    source: Lease
    target: Lease
    tokens: bytes  # of the blocks that are copied


class HostTier:
    """The store of the host pool, and all copies under way in either direction."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.jobs: dict[int, CopyJob] = {}

    @property
    def num_copying(self) -> int:
        return sum(len(job.order.src) // HANDLE_BYTES for job in self.jobs.values())
