"""Publish: make full blocks findable.

    lease      ... node | tokens to publish                              |
    tree       ... node | already there: walked over | new: becomes CACHED |

What the tree has already is not stored twice: the pin moves over it and the lease keeps its own copy until it ends.
A decoding lease publishes one block at a time; while it is alone on a leaf, that leaf grows in place.
"""

from __future__ import annotations

from coppice.ids import TOKEN_BYTES
from coppice.messages.index import Answer, NotPublished, NotPublishedReason, Publish, Published
from coppice.seals import NO_SEAL, SEAL_BYTES, chain_seals
from coppice_cache.core.base.errors import OpRefused
from coppice_cache.core.base.settings import Mode
from coppice_cache.core.ops.pins import extend_pins
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.radix.tree import path
from coppice_cache.core.state.state import NS_PER_MS, State
from coppice_cache.core.state.workers import Worker


def publish(state: State, worker: Worker, lease: Lease, op: Publish, now_ns: int) -> Answer:
    """Blocks [first_block, first_block + n) of the sequence are full and written."""
    if lease.account.config.mode is Mode.DISABLED:
        return NotPublished(op.lease_id, NotPublishedReason.DOMAIN_DISABLED)
    if lease.tree is None or lease.held or not worker.is_findable(lease):
        worker.flights.end(lease)
        return NotPublished(op.lease_id, NotPublishedReason.TREE_GONE)
    end = op.first_block + _check(state, worker, lease, op)
    named_end = op.first_block + op.num_named_blocks
    known = max(0, min(lease.num_settled, end) - named_end)  # of the blocks whose tokens it says
    if known:
        _check_same(lease, named_end, op.tokens[: known * worker.block_bytes], worker.block_bytes)
    if end > lease.num_settled:
        tokens = worker.flights.tokens(lease, named_end) + op.tokens[known * worker.block_bytes :]
        if lease.num_settled < lease.num_claimed:
            _check_sealed(worker, lease, tokens)
        _advance(state, worker, lease, tokens, now_ns)
        extend_pins(state, worker, lease.tree)
    return _answer(worker, lease, op, end)


def _advance(state: State, worker: Worker, lease: Lease, tokens: bytes, now_ns: int) -> None:
    """Settle the blocks after `num_settled`."""
    worker.end_copy(lease)
    if worker.flights.departs(lease, tokens):
        worker.flights.end(lease)
    cached = worker.insert(lease, tokens, now_ns)
    if cached:
        worker.remember_publication(cached, now_ns, state.settings.worker_ttl_ms * NS_PER_MS)
    worker.flights.advance(lease)
    worker.quotas.refresh(lease.account)


def _answer(worker: Worker, lease: Lease, op: Publish, end: int) -> Published:
    """The same for a repeated op: which of the range are the lease's own blocks that the tree holds."""
    handles = lease.published_handles(op.first_block, end)
    return Published(op.lease_id, lease.num_settled, handles, worker.ledger.seals_of(handles))


def _check(state: State, worker: Worker, lease: Lease, op: Publish) -> int:
    """Number of blocks in the op. Raises OpRefused."""
    count = op.num_named_blocks + len(op.tokens) // worker.block_bytes
    if len(op.tokens) % worker.block_bytes or not count:
        raise OpRefused(
            f"tokens have {len(op.tokens)} bytes; they must be whole blocks of {worker.block_bytes}, and at least one "
            "where none is published by its number"
        )
    if len(op.tokens) // TOKEN_BYTES > state.settings.tokens_max:
        raise OpRefused(f"{len(op.tokens) // TOKEN_BYTES} tokens; at most {state.settings.tokens_max}")
    if not 0 <= op.first_block <= lease.num_settled:
        raise OpRefused(f"first_block {op.first_block} leaves a gap: {lease.num_settled} blocks are published so far")
    if op.first_block + count > lease.num_blocks:
        raise OpRefused(f"blocks up to {op.first_block + count} were published; the lease has {lease.num_blocks}")
    named_end, num_kept = op.first_block + op.num_named_blocks, worker.flights.num_blocks(lease)
    if named_end > max(lease.num_settled, num_kept):
        raise OpRefused(f"blocks up to {named_end} are to have tokens of the acquire; {num_kept} blocks of it are kept")
    return count


def _check_sealed(worker: Worker, lease: Lease, tokens: bytes) -> None:
    """What was published before a restart must be published again with the same tokens: the worker has its seal.

    Where the tree was lost and the seal key is another than before, nothing has that seal: the lease publishes no more.
    """
    assert lease.tree is not None
    first = lease.num_settled
    parent = worker.ledger.seal(lease.node.last_block) if first else NO_SEAL
    seals = chain_seals(lease.tree.chain_key, parent, tokens, worker.block_bytes)
    known = worker.ledger.seals_of(lease.handles(first, first + len(seals) // SEAL_BYTES))
    for index in range(0, len(seals), SEAL_BYTES):
        seal = known[index : index + SEAL_BYTES]
        if seal not in (NO_SEAL, seals[index : index + SEAL_BYTES]):
            raise OpRefused(f"other tokens were published before the restart in block {first + index // SEAL_BYTES}")


def _check_same(lease: Lease, first: int, tokens: bytes, block_bytes: int) -> None:
    """A repeated range must repeat its tokens: a block's content never changes under its generation."""
    published = b"".join(node.tokens for node in path(lease.node))
    start = first * block_bytes
    if published[start : start + len(tokens)] != tokens:
        raise OpRefused(f"other tokens were published from block {first} on")
