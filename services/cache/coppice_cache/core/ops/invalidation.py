"""Forget what is cached, of a domain, of a namespace, of both, of everything, or what follows one prefix.

From the call on nobody finds it: a tree by its stamp, a subtree because its parent does not list it. Nothing is walked
then. Leases that read it go on, and publish there no more. The memory comes back in slices at every tick, at once where
it is needed, and before anything that can still be found.
"""

from __future__ import annotations

from coppice.ids import TOKEN_BYTES, DomainId, Namespace
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.settings import is_text
from coppice_cache.core.pool.deferred_free import doom
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.tree import Spot, Tree, root_of, walk
from coppice_cache.core.state.state import State
from coppice_cache.core.state.workers import Worker


def invalidate(
    state: State, domain: DomainId | None, namespace: Namespace | None, tokens: bytes | None, now_ns: int
) -> int:
    """How many trees lost something that could be found until now.

    `tokens` (packed u32) names a prefix; its last whole block and all that follows it are forgotten.
    Raises MessageRefused for tokens without a domain and a namespace, and for tokens that are cut.
    """
    if domain is not None and not is_text(domain):
        raise MessageRefused(f"domain {domain!r} is no text")
    if tokens is None:
        count = sum(_is_affected(worker, tree, domain, namespace) for worker, tree in _trees(state))
        state.incarnations.invalidate(domain, namespace)
        for worker in state.workers.values():
            worker.changes.cleared(domain, namespace)
        return count
    if domain is None or namespace is None:
        raise MessageRefused("tokens name a prefix in one tree: give its domain and namespace too")
    if len(tokens) % TOKEN_BYTES or not tokens:
        raise MessageRefused(f"tokens have {len(tokens)} bytes; they must be packed u32, and at least one")
    if state.replay.worker_ids:
        state.replay.distrusted.add((domain, namespace))
    stores = [worker.host.store for worker in state.workers.values() if worker.host is not None]
    for store in stores:
        _cut_prefix(store, domain, namespace, tokens)
    return sum(_cut_prefix(worker, domain, namespace, tokens) for worker in state.workers.values())


def _trees(state: State) -> list[tuple[Worker, Tree]]:
    return [(worker, tree) for worker in state.workers.values() for tree in worker.trees.values()]


def _is_affected(worker: Worker, tree: Tree, domain: DomainId | None, namespace: Namespace | None) -> bool:
    named = domain in (None, tree.domain) and namespace in (None, tree.namespace)
    return named and bool(tree.children) and worker.is_current(tree)


def _cut_prefix(store: BlockStore, domain: DomainId, namespace: Namespace, tokens: bytes) -> bool:
    tree = store.find_tree(domain, namespace)
    num_blocks = len(tokens) // store.block_bytes
    if tree is None or not num_blocks:
        return False
    spot = walk(tree, tokens, store.block_bytes, num_blocks * store.block_bytes)
    if spot.num_blocks < num_blocks:
        return False  # the block in question is not there, so nothing follows it
    cut(store, Spot(spot.node, spot.blocks_into - 1, 0))
    return True


def cut(store: BlockStore, spot: Spot) -> None:
    """What follows the spot, on its edge and below, is found by nobody any more."""
    node = spot.node
    if spot.blocks_into:
        store.settle(store.quotas.uses[root_of(node).domain], spot)
    doom(store, node)
