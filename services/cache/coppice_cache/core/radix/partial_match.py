"""The block that agrees in part: found for a copy, where no whole block matches any more.

    match ends here  --+-- [c d e f]
                       +-- [c d x y]   asked for: c d e g  ->  3 tokens of [c d e f] can be copied
                       `-- [q r s t]

Among the children's first blocks in byte order, the one with the longest common beginning is a neighbour of what is
asked for. Of several that agree as far, the oldest child is taken: byte order would tell others what is in a prompt, as
what is copied from stays for a while. The order is kept for nodes where somebody asked, and only there: most never
need it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from coppice.ids import TOKEN_BYTES
from coppice_cache.core.radix.tree import MatchPosition, Node, common_run

ORDERS_MAX = 1_024  # nodes whose children are kept in order, on one worker
CHILDREN_MAX = 16_384  # a node with more is not searched: each new child would move as many pointers


@dataclass(frozen=True, slots=True)
class PartialMatch:
    """`num_tokens` at the start of block `index` of the edge of `node` continue the match."""

    node: Node
    index: int
    num_tokens: int


def common_tokens(first: bytes, second: bytes) -> int:
    """How many tokens two blocks share from their beginnings."""
    return common_run(first, 0, len(first), second, TOKEN_BYTES, least=0)


class _Order:
    """First blocks of the children of one node, sorted, and which of them came first. A stale one is dropped when it is
    met."""

    __slots__ = ("_next", "ages", "blocks")

    def __init__(self, node: Node) -> None:
        aged = {block: age for age, block in enumerate(node.children)}  # in the order in which they were hung up
        self.blocks = sorted(aged)
        self.ages = array("q", [aged[block] for block in self.blocks])
        self._next = len(aged)

    def add(self, block: bytes) -> None:
        at = bisect_left(self.blocks, block)
        if at < len(self.blocks) and self.blocks[at] == block:
            self.ages[at] = self._next
        else:
            self.blocks.insert(at, block)
            self.ages.insert(at, self._next)
        self._next += 1

    def drop(self, at: int) -> None:
        del self.blocks[at], self.ages[at]

    def longest(self, node: Node, wanted: bytes) -> int:
        """How many tokens a child has in common with `wanted` at most."""
        at = bisect_left(self.blocks, wanted)
        while at < len(self.blocks) and self.blocks[at] not in node.children:
            self.drop(at)
        while at > 0 and self.blocks[at - 1] not in node.children:
            at -= 1
            self.drop(at)
        return max((common_tokens(block, wanted) for block in self.blocks[max(0, at - 1) : at + 1]), default=0)

    def oldest(self, node: Node, begin: bytes) -> Node:
        """Of the children that begin so, of which there is one."""
        low = bisect_left(self.blocks, begin)
        high = bisect_right(self.blocks, begin + b"\xff" * (len(self.blocks[low]) - len(begin)))
        while True:
            at = low + int(np.frombuffer(self.ages, np.int64)[low:high].argmin())
            child = node.children.get(self.blocks[at])
            if child is not None:
                return child
            self.drop(at)
            high -= 1


class ChildOrders:
    """Sorted first blocks of the children of some nodes of one worker."""

    def __init__(self) -> None:
        self._orders: OrderedDict[Node, _Order] = OrderedDict()  # least recently asked first

    def added(self, parent: Node, block: bytes) -> None:
        """A child was hung up below `parent`. One that goes need not be told."""
        order = self._orders.get(parent)
        if order is None:
            return
        if len(order.blocks) >= CHILDREN_MAX:
            del self._orders[parent]
            return
        order.add(block)

    def find(self, position: MatchPosition, tokens: bytes, block_bytes: int) -> PartialMatch | None:
        """The best partly matching block after `position` for `tokens`, which follow the match and are to be cached."""
        wanted, node = tokens[:block_bytes], position.node
        if position.blocks_into < node.num_blocks:
            start = position.blocks_into * block_bytes
            shared = common_tokens(node.tokens[start : start + block_bytes], wanted)
            return PartialMatch(node, position.blocks_into, shared) if shared else None
        if not node.children or len(node.children) > CHILDREN_MAX:
            return None
        order = self._order(node)
        shared = order.longest(node, wanted)
        return PartialMatch(order.oldest(node, wanted[: shared * TOKEN_BYTES]), 0, shared) if shared else None

    def _order(self, node: Node) -> _Order:
        order = self._orders.get(node)
        if order is None:
            order = self._orders[node] = _Order(node)
            if len(self._orders) > ORDERS_MAX:
                self._orders.popitem(last=False)
        self._orders.move_to_end(node)
        return order
