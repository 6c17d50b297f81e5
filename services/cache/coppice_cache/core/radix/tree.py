"""Radix tree over runs of whole blocks: which tokens are where.

    Tree (root, no blocks)
     |- [a b c]            an edge is a run of blocks: tokens and handles packed side by side; the ledger has the seals
     |   |- [d e]  pins {7}
     |   `- [f]            children are keyed by the bytes of their first block
     `- [g h]

A lookup takes one dict access and one memcmp per node; where an edge agrees only in part, the split point is found by
binary search. Lookups never change the tree. A pin is the number of a lease and sits on the deepest node of its path
only. `guards` counts what protects a node: its own pins as one, and each child that is guarded. A node without
guards has no pin anywhere below it, so its blocks can be evicted, leaves first.

A node that holds what is not to be trusted any more becomes an orphan with all that hangs below it: its parent does not
list it, so no walk finds it, while it still guards its parent for the leases that read both. What guards no lease is
freed at once.

Parent links make cycles with `children`; both are cut when a node leaves the tree, so that reference counting alone
frees it. A leaf has no dict of its own, and an edge of one block is its own key, so a leaf of one block of 16 tokens
takes about 300 bytes with its place in the parent.

Only the deepest node of a used path gets a new `last_use_ns`. That is enough for an order of eviction: an inner node
becomes a leaf when its last child goes, and that child was the coldest leaf, so its parent may as well be next.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from coppice.handles import BLOCKS_MAX, HANDLE_BYTES
from coppice.ids import DomainId, Namespace
from coppice.seals import ChainKey
from coppice_cache.core.radix.sharded_dict import SHARDED_FROM, ShardedDict

EDGE_BLOCKS_MAX = 256  # an edge that grows in place is copied with every block; past this a child is started
NEVER_COPIED = -1  # in a node's `copied_use_ns`
NEUTRAL_LEVEL = 16  # of a node that the eviction policy knows nothing of
_NO_PINS: frozenset[int] = frozenset()
_LISTS = (dict, ShardedDict)  # of children, when there are any


class Link:
    """A place in a ring, from the leaf used longest ago to the one used last; on its own it is where both ends meet."""

    __slots__ = ("colder", "warmer")

    def __init__(self) -> None:
        self.colder: Link | None = None
        self.warmer: Link | None = None

    def unlink(self) -> None:
        """Leave the ring; without effect outside of one."""
        colder, warmer = self.colder, self.warmer
        if colder is not None and warmer is not None:
            colder.warmer = warmer
            warmer.colder = colder
            self.colder = self.warmer = None


class Retention:
    """What a client asked for: keep some nodes until then, after everything of lower priority."""

    __slots__ = ("nodes", "priority", "until_ns")

    def __init__(self, priority: int, until_ns: int) -> None:
        self.priority = priority
        self.until_ns = until_ns
        self.nodes: list[Node] = []


class Node(Link):
    """One edge and what hangs below it. `level`, `uses`, `used_at` and `retained` belong to the eviction policy."""

    __slots__ = (
        "children",
        "copied_use_ns",
        "guards",
        "handles",
        "is_orphan",
        "last_use_ns",
        "level",
        "parent",
        "pins",
        "retained",
        "tokens",
        "used_at",
        "uses",
    )

    def __init__(self, parent: Node | None, tokens: bytes, handles: bytes, last_use_ns: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.handles = handles
        self.last_use_ns = last_use_ns
        self.copied_use_ns = NEVER_COPIED  # the use since which it was ordered to the other tier; see `offload`
        self.children: Mapping[bytes, Node] = _NO_CHILDREN  # read only from outside; see `list_child`
        self.pins: set[int] | frozenset[int] = _NO_PINS
        self.guards = 0
        self.is_orphan = False
        self.colder = self.warmer = None
        self.level = NEUTRAL_LEVEL
        self.uses = 1
        self.used_at = 0
        self.retained: Retention | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.handles) // HANDLE_BYTES

    def block(self, index: int) -> int:
        """Id of a block of the edge."""
        start = index * HANDLE_BYTES
        return int.from_bytes(self.handles[start : start + HANDLE_BYTES], "little") & (BLOCKS_MAX - 1)

    @property
    def last_block(self) -> int:
        """Id of the deepest block of the edge; a root has none."""
        return int.from_bytes(self.handles[-HANDLE_BYTES:], "little") & (BLOCKS_MAX - 1)

    @property
    def is_evictable(self) -> bool:
        """A leaf with blocks that nothing protects. False for a root and for a node that left its tree."""
        return bool(self.handles) and not self.children and not self.guards

    def pin(self, number: int) -> int:
        """Add a pin; returns how many blocks became protected by it."""
        if self.pins:
            assert isinstance(self.pins, set)
            self.pins.add(number)
            return 0
        self.pins = {number}
        gained = 0
        node: Node | None = self
        while node is not None:
            node.guards += 1
            if node.guards > 1:
                break
            gained += node.num_blocks
            node = node.parent
        return gained

    def unpin(self, number: int) -> int:
        """Take a pin away; returns how many blocks lost their protection."""
        assert isinstance(self.pins, set)
        self.pins.remove(number)
        if self.pins:
            return 0
        self.pins = _NO_PINS
        lost = 0
        node: Node | None = self
        while node is not None:
            node.guards -= 1
            if node.guards > 0:
                break
            lost += node.num_blocks
            node = node.parent
        return lost

    def list_child(self, key: bytes, child: Node) -> None:
        """Have `child` found under `key`, in place of whichever was."""
        if self.children is _NO_CHILDREN:
            self.children = {key: child}
            return
        assert isinstance(self.children, _LISTS)
        self.children[key] = child
        if len(self.children) == SHARDED_FROM and isinstance(self.children, dict):
            self.children = ShardedDict(self.children)

    def unlist_child(self, key: bytes, child: Node) -> None:
        """No more find `child`; another one may stand under its key by now, and stays."""
        if self.children.get(key) is child:
            assert isinstance(self.children, _LISTS)
            del self.children[key]
            if not self.children:
                self.children = _NO_CHILDREN

    def cut_loose(self) -> None:
        """Drop the links that make cycles; for nodes of a tree that is dead as a whole."""
        self.children = _NO_CHILDREN
        self.parent = None
        self.unlink()

    def append(self, tokens: bytes, handles: bytes) -> None:
        """Make the edge longer in place."""
        self.tokens += tokens
        self.handles += handles

    def trim(self, count: int, block_bytes: int) -> bytes:
        """Cut `count` blocks off the end of the edge; returns their handles, deepest last."""
        assert self.is_evictable
        keep = self.num_blocks - count
        assert keep >= 0
        taken = self.handles[keep * HANDLE_BYTES :]
        if keep == 0:
            self.leave(block_bytes)
        else:
            self.tokens = self.tokens[: keep * block_bytes]
            self.handles = self.handles[: keep * HANDLE_BYTES]
        return taken

    def leave(self, block_bytes: int) -> bytes:
        """Go, as nothing hangs below any more; returns the handles."""
        assert self.parent is not None
        assert not self.children
        self.hide(block_bytes)
        self.unlink()
        self.parent = None
        handles = self.handles
        self.tokens = self.handles = b""
        return handles

    def hide(self, block_bytes: int) -> None:
        """The parent lists this node no more; another one may stand under the same key by now."""
        assert self.parent is not None
        self.parent.unlist_child(self.tokens[:block_bytes], self)


_NO_CHILDREN: Mapping[bytes, Node] = MappingProxyType({})


class Tree(Node):
    """Root of one (domain, namespace, worker)."""

    __slots__ = ("block_bytes", "chain_key", "domain", "namespace", "stamp")

    def __init__(
        self, domain: DomainId, namespace: Namespace, chain_key: ChainKey, block_bytes: int, stamp: int = 0
    ) -> None:
        super().__init__(None, b"", b"", 0)
        self.domain = domain
        self.namespace = namespace
        self.chain_key = chain_key
        self.block_bytes = block_bytes
        self.stamp = stamp  # of its incarnation

    @property
    def is_unused(self) -> bool:
        return not self.children and not self.guards


class MatchPosition(NamedTuple):
    """Where a walk ended: `blocks_into` blocks into the edge of `node`, `num_blocks` from the root."""

    node: Node
    blocks_into: int
    num_blocks: int


def common_run(tokens: bytes, start: int, stop: int, edge: bytes, unit: int, *, least: int) -> int:
    """Whole units (blocks, or tokens) that `tokens[start:stop]` and `edge` share; `least` are known to agree."""
    low, high = least, min(stop - start, len(edge)) // unit
    if stop < start + len(edge) and tokens.startswith(edge[: high * unit], start):
        return high  # the edge goes on where the tokens end: a prompt that was asked for before
    while low < high:
        middle = (low + high + 1) // 2
        if tokens.startswith(edge[low * unit : middle * unit], start + low * unit):
            low = middle
        else:
            high = middle - 1
    return low


def walk(start: Node, tokens: bytes, block_bytes: int, stop: int | None = None) -> MatchPosition:
    """Longest run of whole blocks of `tokens`, or of their first `stop` bytes, below `start`. Reads only.

    `num_blocks` and a `blocks_into` of 0 are relative to the end of `start`.
    """
    stop = len(tokens) if stop is None else stop
    node, position, into = start, 0, 0
    while (key_end := position + block_bytes) <= stop:
        child = node.children.get(tokens[position:key_end])
        if child is None:
            break
        edge = child.tokens
        end = position + len(edge)
        if end > stop or not tokens.startswith(edge, position):
            common = common_run(tokens, position, stop, edge, block_bytes, least=1)  # we came by the child's key
            return MatchPosition(child, common, position // block_bytes + common)
        node, position, into = child, end, len(edge) // block_bytes
    return MatchPosition(node, into, position // block_bytes)


def unprotected_blocks(position: MatchPosition) -> int:
    """How many blocks a pin at this position would newly protect."""
    if position.node.guards:
        return 0
    blocks, node = position.blocks_into, position.node.parent
    while node is not None and not node.guards:
        blocks += node.num_blocks
        node = node.parent
    return blocks


def split_edge(position: MatchPosition, block_bytes: int) -> Node:
    """The node that ends exactly at the position; splits an edge when there is none yet.

    The lower part keeps its identity: pins, children and eviction entries stay valid.
    """
    lower, into = position.node, position.blocks_into
    if into == lower.num_blocks:
        return lower
    assert 0 < into < lower.num_blocks
    assert lower.parent is not None
    cut = into * block_bytes
    upper = Node(
        lower.parent,
        lower.tokens[:cut],
        lower.handles[: into * HANDLE_BYTES],
        lower.last_use_ns,
    )
    lower.parent.list_child(upper.tokens[:block_bytes], upper)
    lower.parent = upper
    lower.tokens = lower.tokens[cut:]
    lower.handles = lower.handles[into * HANDLE_BYTES :]
    upper.list_child(lower.tokens[:block_bytes], lower)
    upper.guards = 1 if lower.guards else 0
    upper.level, upper.uses, upper.used_at, upper.retained = lower.level, lower.uses, lower.used_at, lower.retained
    return upper


def root_of(node: Node) -> Tree:
    root = top_of(node)
    assert isinstance(root, Tree)
    return root


def top_of(node: Node) -> Node:
    """The root, unless something above left the tree."""
    while node.parent is not None:
        node = node.parent
    return node


def is_cut_off(node: Node) -> bool:
    """Whether it, or something above it, was hidden: no walk finds it."""
    at: Node | None = node
    while at is not None:
        if at.is_orphan:
            return True
        at = at.parent
    return False


def path(node: Node) -> list[Node]:
    """Nodes from below the root to `node`."""
    nodes = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        nodes.append(at)
        at = at.parent
    nodes.reverse()
    return nodes


def add_child(parent: Node, tokens: bytes, handles: bytes, *, block_bytes: int, now_ns: int) -> Node:
    """Hang a new edge below `parent`."""
    key = tokens[:block_bytes]
    assert key not in parent.children
    child = Node(parent, tokens, handles, now_ns)
    parent.list_child(key, child)
    return child
