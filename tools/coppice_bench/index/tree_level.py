"""The core's trees below its ops: what a lookup and an eviction cost where peers do nothing else either."""

from __future__ import annotations

from coppice.ids import TOKEN_BYTES
from coppice_bench.index.core_driver import DOMAIN, CoreDriver
from coppice_bench.rpc.client import NAMESPACE, WORKER
from coppice_cache.core.pool.quotas import EvictionPlan
from coppice_cache.core.radix.tree import split_edge, walk

_ONE_OF_ITS_OWN = EvictionPlan(from_own=1, from_pool=0)


class TreeLevel:
    """Of a driver whose tree has something in it."""

    def __init__(self, driver: CoreDriver) -> None:
        lease_id = driver.acquire(bytes(TOKEN_BYTES))
        session = driver.core.state.sessions[driver.session]
        self._lease = session.leases[lease_id]
        self._worker = driver.core.state.workers[WORKER]
        self._tree = self._worker.trees[DOMAIN, NAMESPACE]
        self._block_bytes = driver.block_bytes

    def lookup(self, tokens: bytes) -> int:
        """Walk, pin where the match ends, unpin; gives it a new place in the order of eviction. Returns blocks."""
        position = walk(self._tree, tokens, self._block_bytes)
        node = split_edge(position, self._block_bytes)
        self._worker.pin(self._lease, node)
        self._worker.unpin(self._lease, node)
        return position.num_blocks

    def evict_one(self, _: int = 0) -> None:
        """Free one block: the coldest leaf loses its last one."""
        self._worker.make_room(self._lease.account, _ONE_OF_ITS_OWN)
