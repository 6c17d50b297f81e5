"""Full blocks of a lease become findable in the trees of its store.

lease      ... node | tokens to settle                               |
tree       ... node | already there: walked over | new: becomes CACHED |
"""

from __future__ import annotations

from coppice.seals import chain_seals
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.tree import Tree, path, walk


def settle_path(store: BlockStore, lease: Lease, tokens: bytes, seal_key: bytes, now_ns: int) -> bytes:
    """Walk over what is there, hang up the rest, and move the pin; returns the handles that became CACHED.

    `tokens` are the whole blocks that follow what the lease has settled. The lease keeps its own copy of what was there
    already until it ends.
    """
    assert lease.tree is not None
    block_bytes, old = store.block_bytes, lease.node
    spot = walk(old, tokens, block_bytes)
    start, found = lease.num_settled, spot.num_blocks
    node, handles = old, b""
    if found:
        lease.add_duplicates(start, start + found)
        node = store.settle(lease.use, spot)
        passed = path(node)[len(path(old)) :]  # computed by two at once: for the other one that is a use
        lease.use.queue.touched(passed, lease.num_blocks - lease.num_shared, lease.reuse, lease.use.cached, now_ns)
    rest = tokens[found * block_bytes :]
    if rest:
        handles = lease.handles(start + found, start + len(tokens) // block_bytes)
        parent_seal = lease.tree.root_seal if isinstance(node, Tree) else store.ledger.seal(node.last_block)
        node = store.store(lease, node, rest, handles, chain_seals(seal_key, parent_seal, rest, block_bytes), now_ns)
    if node is not old:
        node.last_use_ns = now_ns
        store.pin(lease, node)
        store.unpin(lease, old)
    lease.num_settled = start + len(tokens) // block_bytes
    return handles
