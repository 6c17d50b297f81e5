"""A worker refused blocks that the tree says it has: the entry and everything below it leave the tree.

tree    [a b c]--[d e f]--[g]        distrusted: e
        [a b c]--[d]    [e f]--[g]   [e f] and [g] are orphans: found by nobody, freed when no lease reads them
"""

from __future__ import annotations

from coppice.handles import HANDLE_BYTES
from coppice.messages.index import Distrust, Distrusted
from coppice_cache.core.errors import OpRefused
from coppice_cache.core.leases import Lease
from coppice_cache.core.ledger import unpack_handles
from coppice_cache.core.radix import Node, Spot, path, settle_spot
from coppice_cache.core.workers import Worker


def distrust(worker: Worker, lease: Lease, op: Distrust) -> Distrusted:
    """Only what stands on the lease's own path is listened to; so a client can hurt nobody else's tree.

    Raises OpRefused for handles that are cut.
    """
    if len(op.handles) % HANDLE_BYTES:
        raise OpRefused(f"handles have {len(op.handles)} bytes; they must be packed u64")
    accused = set(unpack_handles(op.handles))
    spot = _first_accused(lease, accused) if lease.tree is not None else None
    if spot is not None:
        _cut(worker, lease, spot)
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


def _cut(worker: Worker, lease: Lease, spot: Spot) -> None:
    node = spot.node
    if spot.blocks_into:
        worker.num_nodes += 1
        settle_spot(spot, worker.block_bytes)
    node.hide(worker.block_bytes)
    below = [node]
    for orphan in below:  # grows while it is walked: parents stand before their children
        orphan.is_orphan = True
        below.extend(orphan.children.values())
    for orphan in reversed(below):
        _free_unread(worker, lease, orphan)
    worker.quotas.settle(lease.use)


def _free_unread(worker: Worker, lease: Lease, orphan: Node) -> None:
    """Children come before their parents, so whatever guards nothing has nothing below it either."""
    if not orphan.guards and orphan.handles:
        worker.offer(lease.use, orphan)
