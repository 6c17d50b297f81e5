"""The block that agrees in part: found for a copy, where no whole block matches any more.

    match ends here  --+-- [c d e f]
                       +-- [c d x y]   asked for: c d e g  ->  3 tokens of [c d e f] can be copied
                       `-- [q r s t]

Among the children's first blocks in byte order, the one with the longest common beginning is a neighbour of what is
asked for. The order is kept for nodes where somebody asked, and only there: most never need it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass

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


class ChildOrders:
    """Sorted first blocks of the children of some nodes of one worker."""

    def __init__(self) -> None:
        self._orders: OrderedDict[Node, list[bytes]] = OrderedDict()  # least recently asked first

    def added(self, parent: Node, key: bytes) -> None:
        """A child was hung up below `parent`. One that goes need not be told: a stale key is dropped when it is met."""
        order = self._orders.get(parent)
        if order is None:
            return
        if len(order) >= CHILDREN_MAX:
            del self._orders[parent]
            return
        at = bisect_left(order, key)
        if at == len(order) or order[at] != key:
            insort(order, key)

    def find(self, position: MatchPosition, tokens: bytes, block_bytes: int) -> PartialMatch | None:
        """The best partly matching block after `position` for `tokens`, which follow the match and are to be cached."""
        wanted = tokens[:block_bytes]
        if position.blocks_into < position.node.num_blocks:
            start = position.blocks_into * block_bytes
            shared = common_tokens(position.node.tokens[start : start + block_bytes], wanted)
            return PartialMatch(position.node, position.blocks_into, shared) if shared else None
        if not position.node.children or len(position.node.children) > CHILDREN_MAX:
            return None
        return self._nearest(position.node, self._order(position.node), wanted)

    def _order(self, node: Node) -> list[bytes]:
        order = self._orders.get(node)
        if order is None:
            order = self._orders[node] = sorted(node.children)
            if len(self._orders) > ORDERS_MAX:
                self._orders.popitem(last=False)
        self._orders.move_to_end(node)
        return order

    @staticmethod
    def _nearest(node: Node, order: list[bytes], wanted: bytes) -> PartialMatch | None:
        at = bisect_left(order, wanted)
        while at < len(order) and order[at] not in node.children:
            del order[at]
        after = order[at] if at < len(order) else b""
        while at > 0 and order[at - 1] not in node.children:
            at -= 1
            del order[at]
        before = order[at - 1] if at > 0 else b""
        key = max((before, after), key=lambda block: common_tokens(block, wanted))
        shared = common_tokens(key, wanted)
        return PartialMatch(node.children[key], 0, shared) if shared else None
