"""Trees in pages, while they change in between.

    token   which tree, then for each node from the root down to the last one told: (place among its siblings, seal)

Nodes come in preorder, siblings in the order in which they came there. A page goes on behind the last node of the page
before. Only what went *before* that node in its list of siblings can have moved it, so it is looked for at its place
and a little to the left. When it is gone, the page goes on with what stands in its place now and says that it moved:
nodes may then be missing or come twice.

A page costs its limit. To skip a million siblings would take longer than all the rest, so where there are many the list
of them is kept from page to page, for the nodes that were asked for last.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from coppice.handles import BLOCKS_MAX, HANDLE_BYTES
from coppice.ids import DomainId, Namespace, WorkerId
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.results import NodeView, TreeDump, TreeView
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.tree import Node, Tree
from coppice_cache.core.state.state import State
from coppice_cache.core.state.workers import Worker

TOKEN_BYTES_MAX = 65_536
_LOOK_BACK = 2_048  # siblings
_SEAL_HEX = 16  # of the first seal of a node, in a token

_LISTED_FROM = 4_096  # children; fewer are skipped quickly enough
_LISTINGS_MAX = 4

TreeKey = tuple[WorkerId, Namespace]
_Path = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class _Token:
    key: TreeKey
    path: _Path | None  # None: nothing of this tree was told

    def packed(self) -> str:
        worker_id, namespace = self.key
        return urlsafe_b64encode(json.dumps([worker_id, namespace.hex(), self.path]).encode()).decode()

    @classmethod
    def parse(cls, text: str) -> _Token:
        """Raises MessageRefused."""
        try:
            if len(text) > TOKEN_BYTES_MAX:
                raise ValueError
            worker_id, namespace, path = json.loads(urlsafe_b64decode(text.encode()))
            steps = None if path is None else tuple((int(place), str(seal)) for place, seal in path)
            if any(place < 0 for place, _ in steps or ()):
                raise ValueError
            return cls((WorkerId(str(worker_id)), Namespace(bytes.fromhex(namespace))), steps)
        except (ValueError, TypeError, Base64Error, RecursionError) as error:
            raise MessageRefused("the page token is none of ours; leave it out to start from the beginning") from error


class Listings:
    """Keys of the children of nodes with many, as they were when somebody began to page through them."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Node, list[bytes]] = OrderedDict()  # least recently asked first

    def children(self, node: Node, start: int) -> Iterator[tuple[int, Node]]:
        """Those that are there still, with their places, from a place on."""
        if len(node.children) < _LISTED_FROM and node not in self._keys:
            yield from enumerate(islice(node.children.values(), start, None), start)
            return
        keys = self._of(node)
        for place in range(start, len(keys)):
            child = node.children.get(keys[place])
            if child is not None:
                yield place, child

    def _of(self, node: Node) -> list[bytes]:
        keys = self._keys.get(node)
        if keys is None:
            keys = self._keys[node] = list(node.children)
            if len(self._keys) > _LISTINGS_MAX:
                self._keys.popitem(last=False)
        self._keys.move_to_end(node)
        return keys


@dataclass(slots=True)
class _Level:
    """Children of one node that are still to be told; `place` is that of the last one taken."""

    node: Node
    children: Iterator[tuple[int, Node]]
    place: int
    first_block: int
    seal: str  # of the child that was taken last


@dataclass(slots=True)
class _Page:
    limit: int
    max_depth: int
    listings: Listings
    moved: bool = False
    cut_by_depth: bool = False
    trees: list[TreeView] = field(default_factory=list)


def dump_page(
    state: State,
    listings: Listings,
    domain: DomainId,
    *,
    max_depth: int,
    limit: int,
    token: str = "",
    worker_id: WorkerId | None = None,
) -> TreeDump:
    """At most `limit` nodes (>= 1), none more than `max_depth` below its root. Raises MessageRefused: a bad token."""
    start = _Token.parse(token) if token else None
    page = _Page(limit, max_depth, listings, moved=start is not None)
    for key, worker, tree in _trees(state, domain, worker_id):
        resumed = None
        if start is not None and key <= start.key:
            if key < start.key:
                continue
            resumed, page.moved = start.path, False
        ended = _dump_tree(page, worker, tree, key, resumed)
        if ended is not None:
            return TreeDump(domain, tuple(page.trees), ended.packed(), page.cut_by_depth, page.moved)
    return TreeDump(domain, tuple(page.trees), "", page.cut_by_depth, page.moved)


def _trees(state: State, domain: DomainId, worker_id: WorkerId | None) -> list[tuple[TreeKey, Worker, Tree]]:
    found = [
        ((worker.worker_id, namespace), worker, tree)
        for worker in state.workers.values()
        if worker_id is None or worker.worker_id == worker_id
        for (owner, namespace), tree in worker.trees.items()
        if owner == domain and worker.is_current(tree)
    ]
    return sorted(found, key=lambda entry: entry[0])


def _dump_tree(page: _Page, worker: Worker, tree: Tree, key: TreeKey, resumed: _Path | None) -> _Token | None:
    """Fill the page from one tree; the token of the next page when it is full."""
    views: list[NodeView] = []
    if resumed is None:
        if page.limit == 0:
            return _Token(key, None)
        views.append(_view(worker, tree, "", 0, 0))
        page.limit -= 1
    levels = _resume(page, worker, tree, resumed or ())
    page.cut_by_depth |= page.max_depth == 0 and bool(tree.children)
    full = _fill(page, worker, levels, views)
    if views:
        page.trees.append(TreeView(key[0], key[1], tuple(views)))
    if not full:
        return None
    return _Token(key, tuple((level.place, level.seal) for level in levels if level.place >= 0))


def _fill(page: _Page, worker: Worker, levels: list[_Level], views: list[NodeView]) -> bool:
    """Whether there is more than the page holds. Leaves in `levels` where the last node told stands."""
    while levels:
        if page.limit == 0:
            return any(next(level.children, None) is not None for level in levels)
        level = levels[-1]
        found = next(level.children, None)
        if found is None:
            levels.pop()
            continue
        level.place, child = found
        parent_seal = levels[-2].seal if len(levels) > 1 else ""
        view = _view(worker, child, parent_seal, len(levels), level.first_block)
        level.seal = view.node
        views.append(view)
        page.limit -= 1
        if len(levels) < page.max_depth:
            levels.append(_level(page, child, 0, level.first_block + child.num_blocks))
        elif child.children:
            page.cut_by_depth = True
    return False


def _level(page: _Page, node: Node, start: int, first_block: int) -> _Level:
    return _Level(node, page.listings.children(node, start), start - 1, first_block, "")


def _resume(page: _Page, worker: Worker, tree: Tree, path: _Path) -> list[_Level]:
    """Levels that go on behind the node that a token names."""
    levels: list[_Level] = []
    node: Node = tree
    first_block = 0
    for place, seal in path[: page.max_depth]:
        found = _find_child(page, worker, node, place, seal)
        if found is None:
            page.moved = True
            levels.append(_level(page, node, place, first_block))
            return levels
        place, child = found
        level = _level(page, node, place + 1, first_block)
        level.seal = first_seal(worker, child)
        levels.append(level)
        node, first_block = child, first_block + child.num_blocks
    if len(levels) < page.max_depth:
        levels.append(_level(page, node, 0, first_block))
    return levels


def _find_child(page: _Page, worker: Worker, node: Node, place: int, seal: str) -> tuple[int, Node] | None:
    """At its place or a little to the left, where it moved when others before it went."""
    first = max(0, place - _LOOK_BACK)
    near = page.listings.children(node, first)
    found: tuple[int, Node] | None = None
    for at, child in near:
        if at > place:
            break
        if first_seal(worker, child)[:_SEAL_HEX] == seal[:_SEAL_HEX]:
            found = at, child
    return found


def _view(worker: Worker, node: Node, parent: str, depth: int, first_block: int) -> NodeView:
    return NodeView(
        node=first_seal(worker, node),
        parent=parent,
        depth=depth,
        first_block=first_block,
        num_blocks=node.num_blocks,
        num_pins=len(node.pins),
        num_children=len(node.children),
        last_use_ns=node.last_use_ns,
    )


def first_seal(store: BlockStore, node: Node) -> str:
    if not node.handles:
        return ""
    return store.ledger.seal(int.from_bytes(node.handles[:HANDLE_BYTES], "little") & (BLOCKS_MAX - 1)).hex()
