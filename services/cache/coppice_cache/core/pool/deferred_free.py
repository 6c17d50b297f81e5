"""What was invalidated: found by nobody, taken apart in slices, and first where blocks are needed.

retire   a whole tree, which nobody looks up any more
doom     a node and all below it
reap     free a part of what a domain has doomed; what a lease reads stays, and is freed with its last reader
sweep    the slice of every tick
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from coppice_cache.core.pool.quotas import DomainUse
from coppice_cache.core.radix.tree import Node, Tree, root_of

if TYPE_CHECKING:
    from coppice_cache.core.pool.store import BlockStore

_CHILDREN_AT_ONCE = 256  # of a node with a million, the rest when it is met again


@dataclass(slots=True)
class Sweeping:
    """How far the trees of one store were compared with the latest invalidation."""

    version: int
    trees: list[Tree] = field(default_factory=list)


def retire(store: BlockStore, tree: Tree) -> None:
    del store.trees[tree.domain, tree.namespace]
    if tree.children:
        store.quotas.uses[tree.domain].doomed.extend(tree.children.values())


def doom(store: BlockStore, top: Node) -> None:
    """Nobody finds this node or what hangs below it; the memory comes back later."""
    parent, use = top.parent, store.quotas.uses[root_of(top).domain]
    assert parent is not None
    top.is_orphan = True
    store.hide(top)
    use.doomed.append(top)
    store.offer(use, parent)


def reap(store: BlockStore, use: DomainUse, *, num_blocks: int, num_nodes: float = inf) -> int:
    """Stop when so many blocks are free or so many nodes were looked at; returns the blocks that became free.

    Parents stand below their children on the stack, so each is met again when nothing unread hangs below it.
    """
    before, stack = use.cached, use.doomed
    while stack and before - use.cached < num_blocks and num_nodes > 0:
        node = stack[-1]
        num_nodes -= 1
        if node.handles and node.children:
            below = list(islice((child for child in node.children.values() if not child.is_orphan), _CHILDREN_AT_ONCE))
            for child in below:
                child.is_orphan = True
            if below:
                stack.extend(below)
                continue
        stack.pop()
        node.is_orphan = True
        if node.handles and not node.guards:
            store.offer(use, node)
    store.quotas.settle(use)
    return before - use.cached


def sweep(store: BlockStore, num_nodes: int) -> None:
    """Find trees that were invalidated and not asked for since, and take apart what is doomed.

    A strict domain waits for nobody: its victims must not depend on what others have to be taken apart.
    """
    sweeping = store.sweeping
    if sweeping.version != store.incarnations.version:
        sweeping.version = store.incarnations.version
        sweeping.trees = list(store.trees.values())
        strict = {use.config.domain for use in store.quotas.uses.values() if use.is_strict}
        for tree in [tree for tree in sweeping.trees if tree.domain in strict]:
            _retire_if_old(store, tree)
    for _ in range(min(num_nodes, len(sweeping.trees))):
        _retire_if_old(store, sweeping.trees.pop())
    is_over = False
    for use in store.quotas.uses.values():
        if use.doomed and (use.is_strict or not is_over):
            reap(store, use, num_blocks=store.num_blocks, num_nodes=num_nodes)
            is_over = is_over or not use.is_strict


def _retire_if_old(store: BlockStore, tree: Tree) -> None:
    if store.trees.get((tree.domain, tree.namespace)) is tree and not store.is_current(tree):
        retire(store, tree)
