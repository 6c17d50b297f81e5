"""A worker refused blocks that the tree says it has: the entry and everything below it leave the tree.

tree    [a b c]--[d e f]--[g]        distrusted: e
        [a b c]--[d]    [e f]--[g]   [e f] and [g] are orphans: found by nobody, freed when no lease reads them
"""

from __future__ import annotations

from coppice.handles import HANDLE_BYTES
from coppice.messages.index import Distrust, Distrusted
from coppice_cache.core.base.errors import OpRefused
from coppice_cache.core.ops.invalidation import cut
from coppice_cache.core.pool.deferred_free import reap
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.packed import unpack_handles
from coppice_cache.core.radix.tree import Spot, path
from coppice_cache.core.state.workers import Worker

_NODES_AT_ONCE = 256  # the rest of a larger subtree is taken apart later


def distrust(worker: Worker, lease: Lease, op: Distrust) -> Distrusted:
    """Only what stands on the lease's own path is listened to; so a client can hurt nobody else's tree.

    Raises OpRefused for handles that are cut.
    """
    if len(op.handles) % HANDLE_BYTES:
        raise OpRefused(f"handles have {len(op.handles)} bytes; they must be packed u64")
    accused = set(unpack_handles(op.handles))
    is_found = lease.tree is not None and worker.is_current(lease.tree)  # else all of it is forgotten already
    spot = _first_accused(lease, accused) if is_found else None
    if spot is not None:
        cut(worker, spot)
        reap(worker, lease.use, num_blocks=worker.num_blocks, num_nodes=_NODES_AT_ONCE)
        worker.quotas.settle(lease.use)
    return Distrusted(op.lease_id)


def _first_accused(lease: Lease, accused: set[int]) -> Spot | None:
    """Just above the first accused block that can still be found; None when there is none."""
    for node in path(lease.node):
        if node.is_orphan:
            return None
        for index, handle in enumerate(unpack_handles(node.handles)):
            if handle in accused:
                return Spot(node, index, 0)
    return None
