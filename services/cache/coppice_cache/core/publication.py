"""Publish: make full blocks findable.

    lease      ... node | tokens to publish                              |
    tree       ... node | already there: walked over | new: becomes CACHED |

What the tree has already is not stored twice: the pin moves over it and the lease keeps its own copy until it ends.
A decoding lease publishes one block at a time; while it is alone on a leaf, that leaf grows in place.
"""

from __future__ import annotations

from coppice.ids import TOKEN_BYTES
from coppice.messages.index import Answer, NotPublished, NotPublishedReason, Publish, Published
from coppice.seals import SEAL_BYTES, chain_seals
from coppice_cache.core.errors import OpRefused
from coppice_cache.core.leases import Lease
from coppice_cache.core.ledger import unpack_blocks
from coppice_cache.core.radix import EDGE_BLOCKS_MAX, Node, Tree, add_child, path, settle_spot, walk
from coppice_cache.core.settings import Mode
from coppice_cache.core.state import NS_PER_MS, State
from coppice_cache.core.workers import Worker


def publish(state: State, worker: Worker, lease: Lease, op: Publish, now_ns: int) -> Answer:
    """Blocks [first_block, first_block + n) of the sequence are full and written."""
    if lease.use.config.mode is Mode.DISABLED:
        return NotPublished(op.lease_id, NotPublishedReason.DOMAIN_DISABLED)
    if lease.tree is None or lease.node.is_orphan:
        return NotPublished(op.lease_id, NotPublishedReason.TREE_GONE)
    count = _check(state, worker, lease, op)
    end = op.first_block + count
    known = max(0, min(lease.num_settled, end) - op.first_block)
    if known:
        _check_same(lease, op.first_block, op.tokens[: known * worker.block_bytes], worker.block_bytes)
    if end > lease.num_settled:
        _advance(state, worker, lease, op.tokens[known * worker.block_bytes :], now_ns)
    return _answer(worker, lease, op, end)


def _advance(state: State, worker: Worker, lease: Lease, tokens: bytes, now_ns: int) -> None:
    """Settle the blocks after `num_settled`: walk over what is there, hang up the rest."""
    block_bytes, old = worker.block_bytes, lease.node
    spot = walk(old, tokens, block_bytes)
    start, found = lease.num_settled, spot.num_blocks
    node = old
    if found:
        lease.duplicates = {*lease.duplicates, *range(start, start + found)}
        if spot.blocks_into < spot.node.num_blocks:
            worker.num_nodes += 1
        node = settle_spot(spot, block_bytes)
    rest = tokens[found * block_bytes :]
    if rest:
        node = _hang_up(state, worker, lease, node, start + found, rest, now_ns)
    if node is not old:
        node.last_use_ns = now_ns
        worker.pin(lease, node)
        worker.unpin(lease, old)
    lease.num_settled = start + len(tokens) // block_bytes
    worker.quotas.settle(lease.use)


def _hang_up(state: State, worker: Worker, lease: Lease, node: Node, first: int, tokens: bytes, now_ns: int) -> Node:
    """The lease's own blocks from `first` on become CACHED below `node`; returns the node that ends with them."""
    assert lease.tree is not None
    count = len(tokens) // worker.block_bytes
    handles = lease.handles(first, first + count)
    parent_seal = lease.tree.root_seal if isinstance(node, Tree) else node.seals[-SEAL_BYTES:]
    seals = chain_seals(state.settings.seal_key, parent_seal, tokens, worker.block_bytes)
    for index, block in enumerate(unpack_blocks(handles)):
        worker.ledger.publish(block, seals[index * SEAL_BYTES : (index + 1) * SEAL_BYTES])
    worker.remember_publication(handles, now_ns, state.settings.worker_ttl_ms * NS_PER_MS)
    alone = node.pins == {lease.number} and node.guards == 1 and not node.children and not isinstance(node, Tree)
    if alone and node.num_blocks + count <= EDGE_BLOCKS_MAX:
        node.append(tokens, handles, seals)
        lease.use.protected += count
        node.last_use_ns = now_ns
        return node
    worker.num_nodes += 1
    return add_child(node, tokens, handles, seals, block_bytes=worker.block_bytes, now_ns=now_ns)


def _answer(worker: Worker, lease: Lease, op: Publish, end: int) -> Published:
    """The same for a repeated op: which of the range are the lease's own blocks that the tree holds."""
    handles, seals = bytearray(), bytearray()
    for index in range(max(op.first_block, lease.num_shared), end):
        if index not in lease.duplicates:
            handles += lease.handles(index, index + 1)
            seals += worker.ledger.seal(lease.block(index))
    return Published(op.lease_id, lease.num_settled, bytes(handles), bytes(seals))


def _check(state: State, worker: Worker, lease: Lease, op: Publish) -> int:
    """Number of blocks in the op. Raises OpRefused."""
    if len(op.tokens) % worker.block_bytes or not op.tokens:
        raise OpRefused(
            f"tokens have {len(op.tokens)} bytes; they must be whole blocks of {worker.block_bytes}, and at least one"
        )
    if len(op.tokens) // TOKEN_BYTES > state.settings.tokens_max:
        raise OpRefused(f"{len(op.tokens) // TOKEN_BYTES} tokens; at most {state.settings.tokens_max}")
    if not 0 <= op.first_block <= lease.num_settled:
        raise OpRefused(f"first_block {op.first_block} leaves a gap: {lease.num_settled} blocks are published so far")
    count = len(op.tokens) // worker.block_bytes
    if op.first_block + count > lease.num_blocks:
        raise OpRefused(f"blocks up to {op.first_block + count} were published; the lease has {lease.num_blocks}")
    return count


def _check_same(lease: Lease, first: int, tokens: bytes, block_bytes: int) -> None:
    """A repeated range must repeat its tokens: a block's content never changes under its generation."""
    published = b"".join(node.tokens for node in path(lease.node))
    start = first * block_bytes
    if published[start : start + len(tokens)] != tokens:
        raise OpRefused(f"other tokens were published from block {first} on")
