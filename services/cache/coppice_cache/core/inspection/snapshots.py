"""All findable blocks in slices, while the trees change in between.

    cursor   trees still to come | the tree that is being walked | a stack of (node, keys of its children, next)

A step looks up the next key below its node *now*: whatever stands there is told, and its children come next. So what is
findable from the first slice to the last is told at least once: an edge that was split meanwhile still starts with its
key, and a node that went had nothing below it. A run is told after the run that it continues. What came or went
meanwhile may be told or not; the events tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coppice_cache.core.base.events import Stored
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.sharded_dict import Keys, key_parts
from coppice_cache.core.radix.tree import Node, Tree
from coppice_cache.core.state.state import State
from coppice_cache.core.state.workers import Worker

_STEPS_PER_BLOCK = 4  # keys that are looked up in vain cost time too


@dataclass(slots=True)
class Cursor:
    """Where a snapshot goes on. For the core that gave it only."""

    trees: list[tuple[Worker, BlockStore, Tree]]
    stack: list[tuple[Node, Keys, int]] = field(default_factory=list)


def next_slice(state: State, cursor: Cursor | None, max_blocks: int) -> tuple[list[Stored], Cursor | None]:
    """Runs of about `max_blocks` blocks, and the cursor for the next slice; None at the end. Starts with None."""
    if cursor is None:
        cursor = Cursor(_trees(state))
    told: list[Stored] = []
    blocks_left, steps_left = max_blocks, max_blocks * _STEPS_PER_BLOCK
    while cursor.trees:
        worker, store, tree = cursor.trees[-1]
        if not cursor.stack:
            cursor.stack.extend((tree, keys, 0) for keys in key_parts(tree.children))
        while cursor.stack and _is_found(state, worker, store, tree):
            if blocks_left <= 0 or steps_left <= 0:
                return told, cursor
            steps_left -= 1
            node = _step(cursor)
            if node is not None:
                blocks_left -= node.num_blocks
                told.append(_told(store, tree, node))
        cursor.stack.clear()
        cursor.trees.pop()
    return told, None


def _trees(state: State) -> list[tuple[Worker, BlockStore, Tree]]:
    """Of all tiers."""
    pools = [(worker, store) for worker in state.workers.values() for store in worker.stores]
    return [(worker, store, tree) for worker, store in pools for tree in store.trees.values()]


def _is_found(state: State, worker: Worker, store: BlockStore, tree: Tree) -> bool:
    known = state.workers.get(worker.worker_id)
    return known is worker and store.find_tree(tree.domain, tree.namespace) is tree


def _step(cursor: Cursor) -> Node | None:
    """The next node in preorder; None when there is none any more where one was."""
    parent, keys, at = cursor.stack.pop()
    if isinstance(keys, dict):
        keys = list(keys)
    if at >= len(keys):
        return None
    cursor.stack.append((parent, keys, at + 1))
    node = parent.children.get(keys[at])
    if node is None or node.is_orphan:
        return None
    cursor.stack.extend((node, part, 0) for part in key_parts(node.children))
    return node


def _told(store: BlockStore, tree: Tree, node: Node) -> Stored:
    assert node.parent is not None
    parent_seal = store.ledger.seal(node.parent.last_block) if node.parent.handles else b""
    seals = store.ledger.seals_of(node.handles)
    return store.changes.as_stored(tree, parent_seal, node.tokens, node.handles, seals)
