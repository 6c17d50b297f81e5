"""Hints for a queue: what acquires of these prompts would find, on every worker that has a tree for them."""

from __future__ import annotations

from coppice.ids import TOKEN_BYTES
from coppice.messages.index import MatchHint, MatchHints, MatchQueries, MatchQuery
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.ops.waits import matchable_bytes
from coppice_cache.core.radix.tree import walk
from coppice_cache.core.state.state import State


def match_all(state: State, message: MatchQueries) -> MatchHints:
    """Reads only. Raises MessageRefused for too many queries and for tokens that are cut."""
    limit = state.settings.ops_per_batch_max
    if len(message.queries) > limit:
        raise MessageRefused(f"{len(message.queries)} queries at once; at most {limit}")
    return MatchHints(state.cache_epoch, tuple(_match(state, query) for query in message.queries))


def _match(state: State, query: MatchQuery) -> MatchHint:
    if len(query.tokens) % TOKEN_BYTES or len(query.tokens) // TOKEN_BYTES > state.settings.tokens_max:
        raise MessageRefused(
            f"tokens of a query have {len(query.tokens)} bytes; they must be packed u32, within limits"
        )
    found = []
    namespace = state.with_keyed_salt(query.domain, query.namespace)
    for worker in state.workers.values():
        tree = worker.find_tree(query.domain, namespace)
        if tree is None:
            continue
        stop = matchable_bytes(query.tokens, worker.block_bytes)
        position = walk(tree, query.tokens, worker.block_bytes, stop)
        if position.num_blocks:
            found.append((worker.worker_id, position.num_blocks * worker.block_size))
    return MatchHint(tuple(worker_id for worker_id, _ in found), tuple(count for _, count in found))
