"""Radix tree over runs of whole blocks: which tokens are where.

    Tree (root, no blocks)
     |- [a b c]            an edge is a run of blocks: tokens, handles and seals packed side by side
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
frees it.

Only the deepest node of a used path gets a new `last_use_ns`. That is enough for an order of eviction: an inner node
becomes a leaf when its last child goes, and that child was the coldest leaf, so its parent may as well be next.
"""

from __future__ import annotations

from typing import NamedTuple

from coppice.handles import HANDLE_BYTES
from coppice.ids import DomainId, Namespace
from coppice.seals import SEAL_BYTES

EDGE_BLOCKS_MAX = 256  # an edge that grows in place is copied with every block; past this a child is started
_NO_PINS: frozenset[int] = frozenset()


class Node:
    """One edge and what hangs below it."""

    __slots__ = ("children", "guards", "handles", "is_orphan", "last_use_ns", "parent", "pins", "seals", "tokens")

    def __init__(self, parent: Node | None, tokens: bytes, handles: bytes, seals: bytes, last_use_ns: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.handles = handles
        self.seals = seals
        self.last_use_ns = last_use_ns
        self.children: dict[bytes, Node] = {}
        self.pins: set[int] | frozenset[int] = _NO_PINS
        self.guards = 0
        self.is_orphan = False

    @property
    def num_blocks(self) -> int:
        return len(self.handles) // HANDLE_BYTES

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

    def append(self, tokens: bytes, handles: bytes, seals: bytes) -> None:
        """Make the edge longer in place."""
        self.tokens += tokens
        self.handles += handles
        self.seals += seals

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
            self.seals = self.seals[: keep * SEAL_BYTES]
            self.handles = self.handles[: keep * HANDLE_BYTES]
        return taken

    def leave(self, block_bytes: int) -> bytes:
        """Go, as nothing hangs below any more; returns the handles."""
        assert self.parent is not None
        assert not self.children
        self.hide(block_bytes)
        self.parent = None
        handles = self.handles
        self.tokens = self.handles = self.seals = b""
        return handles

    def hide(self, block_bytes: int) -> None:
        """The parent lists this node no more; another one may stand under the same key by now."""
        assert self.parent is not None
        key = self.tokens[:block_bytes]
        if self.parent.children.get(key) is self:
            del self.parent.children[key]


class Tree(Node):
    """Root of one (domain, namespace, worker)."""

    __slots__ = ("block_bytes", "domain", "namespace", "root_seal")

    def __init__(self, domain: DomainId, namespace: Namespace, root_seal: bytes, block_bytes: int) -> None:
        super().__init__(None, b"", b"", b"", 0)
        self.domain = domain
        self.namespace = namespace
        self.root_seal = root_seal
        self.block_bytes = block_bytes

    @property
    def is_unused(self) -> bool:
        return not self.children and not self.guards


class Spot(NamedTuple):
    """Where a walk ended: `blocks_into` blocks into the edge of `node`, `num_blocks` from the root."""

    node: Node
    blocks_into: int
    num_blocks: int


def _common_blocks(tokens: bytes, start: int, edge: bytes, block_bytes: int) -> int:
    """Whole blocks that `tokens[start:]` and `edge` share. At least one: the caller came through the child's key."""
    low, high = 1, min(len(tokens) - start, len(edge)) // block_bytes
    while low < high:
        middle = (low + high + 1) // 2
        if (
            tokens[start + low * block_bytes : start + middle * block_bytes]
            == edge[low * block_bytes : middle * block_bytes]
        ):
            low = middle
        else:
            high = middle - 1
    return low


def walk(start: Node, tokens: bytes, block_bytes: int) -> Spot:
    """Longest run of whole blocks of `tokens` below `start`. Reads only.

    `num_blocks` and a `blocks_into` of 0 are relative to the end of `start`.
    """
    node, position, into = start, 0, 0
    while True:
        child = node.children.get(tokens[position : position + block_bytes])
        if child is None:
            return Spot(node, into, position // block_bytes)
        edge = child.tokens
        end = position + len(edge)
        if tokens[position:end] != edge:
            common = _common_blocks(tokens, position, edge, block_bytes)
            return Spot(child, common, position // block_bytes + common)
        node, position, into = child, end, len(edge) // block_bytes


def unprotected_blocks(spot: Spot) -> int:
    """How many blocks a pin at this spot would newly protect."""
    if spot.node.guards:
        return 0
    blocks, node = spot.blocks_into, spot.node.parent
    while node is not None and not node.guards:
        blocks += node.num_blocks
        node = node.parent
    return blocks


def settle_spot(spot: Spot, block_bytes: int) -> Node:
    """The node that ends exactly at the spot; splits an edge when there is none yet.

    The lower part keeps its identity: pins, children and eviction entries stay valid.
    """
    lower, into = spot.node, spot.blocks_into
    if into == lower.num_blocks:
        return lower
    assert 0 < into < lower.num_blocks
    assert lower.parent is not None
    cut = into * block_bytes
    upper = Node(
        lower.parent,
        lower.tokens[:cut],
        lower.handles[: into * HANDLE_BYTES],
        lower.seals[: into * SEAL_BYTES],
        lower.last_use_ns,
    )
    lower.parent.children[upper.tokens[:block_bytes]] = upper
    lower.parent = upper
    lower.tokens = lower.tokens[cut:]
    lower.handles = lower.handles[into * HANDLE_BYTES :]
    lower.seals = lower.seals[into * SEAL_BYTES :]
    upper.children[lower.tokens[:block_bytes]] = lower
    upper.guards = 1 if lower.guards else 0
    return upper


def path(node: Node) -> list[Node]:
    """Nodes from below the root to `node`."""
    nodes = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        nodes.append(at)
        at = at.parent
    nodes.reverse()
    return nodes


def add_child(parent: Node, tokens: bytes, handles: bytes, seals: bytes, *, block_bytes: int, now_ns: int) -> Node:
    """Hang a new edge below `parent`."""
    key = tokens[:block_bytes]
    assert key not in parent.children
    child = Node(parent, tokens, handles, seals, now_ns)
    parent.children[key] = child
    return child
