"""Forget what is cached: of a domain, of a namespace, of both, of everything, what follows one prefix, or what a worker
refused although the tree says that it has it. A namespace stands for all its salts.

From the call on nobody finds it: a tree by its stamp, a subtree because its parent does not list it. Nothing is walked
then. Leases that read it go on, and publish there no more. The memory comes back in slices at every tick, at once where
it is needed, and before anything that can still be found.

    tree    [a b c]--[d e f]--[g]        a worker refused e
            [a b c]--[d]    [e f]--[g]   [e f] and [g] are orphans: found by nobody, freed when no lease reads them
"""

from __future__ import annotations

from coppice.handles import HANDLE_BYTES
from coppice.ids import TOKEN_BYTES, DomainId, Namespace
from coppice.messages.index import Distrust, Distrusted
from coppice.namespaces import covers
from coppice_cache.core.base.errors import MessageRefused, OpRefused
from coppice_cache.core.base.settings import is_text
from coppice_cache.core.pool.free_ring import unpack_handles
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.tree import MatchPosition, Tree, path, root_of, walk
from coppice_cache.core.state.state import State
from coppice_cache.core.state.workers import Worker


def invalidate(
    state: State, domain: DomainId | None, namespace: Namespace | None, tokens: bytes | None, now_ns: int
) -> int:
    """How many trees lost something that could be found until now.

    `tokens` (packed u32) names a prefix; its last whole block and all that follows it are forgotten, under each salt.
    Raises MessageRefused for tokens without a domain and a namespace, and for tokens that are cut.
    """
    if domain is not None and not is_text(domain):
        raise MessageRefused(f"domain {domain!r} is no text")
    if tokens is None:
        count = sum(_is_affected(worker, tree, domain, namespace) for worker, tree in _trees(state))
        state.incarnations.invalidate(domain, namespace)
        for worker in state.workers.values():
            worker.changes.cleared(domain, namespace)
            for owner, name in _salted(worker, domain, namespace):
                worker.changes.cleared(owner, name)
        return count
    if domain is None or namespace is None:
        raise MessageRefused("tokens name a prefix: give its domain and namespace too")
    if len(tokens) % TOKEN_BYTES or not tokens:
        raise MessageRefused(f"tokens have {len(tokens)} bytes; they must be packed u32, and at least one")
    state.replay.distrust(domain, namespace)
    state.aside.distrust(domain, namespace)
    for tier in [tier for worker in state.workers.values() for tier in worker.lower_tiers]:
        _cut_prefix(tier.store, domain, namespace, tokens)
    return sum(_cut_prefix(worker, domain, namespace, tokens) for worker in state.workers.values())


def _trees(state: State) -> list[tuple[Worker, Tree]]:
    return [(worker, tree) for worker in state.workers.values() for tree in worker.trees.values()]


def _salted(worker: Worker, domain: DomainId | None, namespace: Namespace | None) -> list[tuple[DomainId, Namespace]]:
    """Trees that go with an unsalted namespace, in any tier. Who follows the changes compares whole names."""
    if namespace is None or not worker.changes.are_told:
        return []
    trees = dict.fromkeys(name for store in worker.stores for name in store.trees)
    return [
        (owner, name)
        for owner, name in trees
        if domain in (None, owner) and name != namespace and covers(namespace, name)
    ]


def _is_affected(worker: Worker, tree: Tree, domain: DomainId | None, namespace: Namespace | None) -> bool:
    named = domain in (None, tree.domain) and (namespace is None or covers(namespace, tree.namespace))
    return named and bool(tree.children) and worker.is_current(tree)


def _cut_prefix(store: BlockStore, domain: DomainId, namespace: Namespace, tokens: bytes) -> int:
    """In how many trees."""
    names = [name for owner, name in store.trees if owner == domain and covers(namespace, name)]
    trees = [tree for name in names if (tree := store.find_tree(domain, name)) is not None]
    return sum(_cut_prefix_of(store, tree, tokens) for tree in trees)


def _cut_prefix_of(store: BlockStore, tree: Tree, tokens: bytes) -> bool:
    num_blocks = len(tokens) // store.block_bytes
    if not num_blocks:
        return False
    position = walk(tree, tokens, store.block_bytes, num_blocks * store.block_bytes)
    if position.num_blocks < num_blocks:
        return False  # the block in question is not there, so nothing follows it
    cut(store, MatchPosition(position.node, position.blocks_into - 1, 0))
    return True


def cut(store: BlockStore, position: MatchPosition) -> None:
    """What follows the position, on its edge and below, is found by nobody any more."""
    node = position.node
    if position.blocks_into:
        store.split(store.quotas.accounts[root_of(node).domain], position)
    store.cut_off(node)


_NODES_AT_ONCE = 256  # the rest of a larger subtree is taken apart later


def distrust(worker: Worker, lease: Lease, op: Distrust) -> Distrusted:
    """Only what stands on the lease's own path is listened to; so a client can hurt nobody else's tree.

    Raises OpRefused for handles that are cut.
    """
    if len(op.handles) % HANDLE_BYTES:
        raise OpRefused(f"handles have {len(op.handles)} bytes; they must be packed u64")
    accused = set(unpack_handles(op.handles))
    is_found = lease.tree is not None and worker.is_current(lease.tree)  # else all of it is forgotten already
    position = _first_accused(lease, accused) if is_found else None
    if position is not None:
        cut(worker, position)
        worker.free_deferred(lease.account, num_blocks=worker.num_blocks, num_nodes=_NODES_AT_ONCE)
        worker.quotas.refresh(lease.account)
    return Distrusted(op.lease_id)


def _first_accused(lease: Lease, accused: set[int]) -> MatchPosition | None:
    """Just above the first accused block that can still be found; None when there is none."""
    for node in path(lease.node):
        if node.is_orphan:
            return None
        for index, handle in enumerate(unpack_handles(node.handles)):
            if handle in accused:
                return MatchPosition(node, index, 0)
    return None
