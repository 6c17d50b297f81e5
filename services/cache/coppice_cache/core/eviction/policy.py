"""Which leaf goes first: one policy object per (worker, domain), so that no tenant has a say in what another loses.

    touched, created, grown, split, hinted, evicted, left    what the trees tell the policy
    offer                                                    a node that may have become an evictable leaf
    coldest, next_victims                                    what the store asks

A policy may take any order but two rules: it names evictable leaves only, and what a client retains goes after
everything of lower priority. Which domain has to give blocks is decided before, by the quotas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from coppice.messages.index import Acquire
from coppice.messages.reuse import CALL_KINDS, Outcome, Reuse
from coppice_cache.core.radix.tree import Node, Retention

_SLACK = 64
NOT_QUEUED = -1  # in a node's `used_at`, which is the use that its entry was made for


class ReuseHint(NamedTuple):
    """What is known of the future of a prompt."""

    reuse: Reuse = Reuse.UNKNOWN  # the client's word
    call_kind: int = 0  # below CALL_KINDS
    outcome: Outcome = Outcome.UNKNOWN  # of its answer, once there is one


NO_HINT = ReuseHint()


def hint_of(op: Acquire) -> ReuseHint:
    """A kind that only a newer scheduler knows is none."""
    return ReuseHint(op.reuse, op.call_kind if op.call_kind < CALL_KINDS else 0)


class EvictionPolicy(ABC):
    """What is common to all: retention."""

    __slots__ = ("_drop_at", "_expiries", "_retained_order")

    def __init__(self) -> None:
        self._expiries: list[tuple[int, int, Retention]] = []  # a heap
        self._retained_order = 0
        self._drop_at = _SLACK

    @abstractmethod
    def touched(self, nodes: list[Node], new_blocks: int, hint: ReuseHint, num_cached: int, now_ns: int) -> None:
        """A request uses this path, from the root down, and brings so many new blocks. Also when the path is empty.

        `hint`: of the prompt; it says nothing of runs that other prompts begin with, too. `num_cached` is how many
        blocks the domain has cached here.
        """

    @abstractmethod
    def created(self, node: Node, seals: bytes, new_blocks: int, hint: ReuseHint) -> None:
        """A run was stored by a request that brings so many new blocks in all. `seals`: 16 bytes per block."""

    @abstractmethod
    def grown(self, node: Node, seals: bytes) -> None:
        """Blocks with these seals were stored at the end of the run."""

    @abstractmethod
    def split(self, upper: Node, lower: Node) -> None:
        """`upper` was cut off the front of `lower` and has the same history."""

    @abstractmethod
    def hinted(self, node: Node, hint: ReuseHint) -> None:
        """This became known of a prompt that ends with the run, since it was used. It holds for what others begin
        with no more than what an access says."""

    @abstractmethod
    def evicted(self, node: Node, seal: bytes, *, is_whole: bool) -> None:
        """The run, or its end, is about to go; `seal` is that of the first block that goes."""

    @abstractmethod
    def left(self, node: Node) -> None:
        """The run is about to go in another way."""

    @abstractmethod
    def offer(self, node: Node) -> None:
        """Called whenever a node may have become evictable; anything else is ignored."""

    @abstractmethod
    def holds(self, node: Node) -> bool:
        """Whether it will come up as a victim; for checks."""

    @abstractmethod
    def coldest(self) -> Node:
        """The next victim. It is a bug to ask when nothing is evictable."""

    @abstractmethod
    def next_victims(self, num_blocks: int) -> list[Node]:
        """The leaves that would go next for so many blocks, in order; they stay where they are."""

    @abstractmethod
    def _relink(self, node: Node) -> None:
        """Its retention changed."""

    def retain(self, nodes: list[Node], priority: int, until_ns: int) -> None:
        """Keep these nodes until then, after everything of lower priority; 0 ends an earlier retention."""
        retention = Retention(priority, until_ns) if priority else None
        if retention is not None:
            retention.nodes = list(nodes)
            self._retained_order += 1
            heappush(self._expiries, (until_ns, self._retained_order, retention))
        for node in nodes:
            node.retained = retention
            self._relink(node)
        if len(self._expiries) > self._drop_at:
            self._drop_replaced()

    def _drop_replaced(self) -> None:
        """A client may retain the same again and again, and for a month: what keeps nothing any more goes before."""
        for _, _, retention in self._expiries:
            retention.nodes = [node for node in retention.nodes if node.retained is retention and node.handles]
        self._expiries = [entry for entry in self._expiries if entry[2].nodes]
        heapify(self._expiries)
        self._drop_at = 2 * len(self._expiries) + _SLACK

    def expire(self, now_ns: int) -> None:
        """End the retentions whose time is over."""
        while self._expiries and self._expiries[0][0] <= now_ns:
            _, _, retention = heappop(self._expiries)
            for node in retention.nodes:
                if node.retained is retention:
                    node.retained = None
                    self._relink(node)


class LruPolicy(EvictionPolicy):
    """Least recently used first.

    A heap with lazy entries. Every evictable leaf has an entry that carries the leaf's `last_use_ns`; an entry whose
    leaf was pinned, grown over, evicted or used since is dropped when it comes up. A partly trimmed leaf keeps its
    entry. When most entries are dead the heap is rebuilt, so its size follows the number of leaves.
    """

    __slots__ = ("_compact_at", "_heap", "_order")

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int, int, Node]] = []
        self._order = 0
        self._compact_at = _SLACK

    def touched(self, nodes: list[Node], new_blocks: int, hint: ReuseHint, num_cached: int, now_ns: int) -> None:
        self.expire(now_ns)

    def created(self, node: Node, seals: bytes, new_blocks: int, hint: ReuseHint) -> None:
        """The node carries its last use itself, as for all that follows."""

    def grown(self, node: Node, seals: bytes) -> None: ...

    def split(self, upper: Node, lower: Node) -> None: ...

    def hinted(self, node: Node, hint: ReuseHint) -> None: ...

    def evicted(self, node: Node, seal: bytes, *, is_whole: bool) -> None: ...

    def left(self, node: Node) -> None: ...

    def offer(self, node: Node) -> None:
        if not node.is_evictable:
            return
        self._order += 1
        node.used_at = node.last_use_ns
        heappush(self._heap, (_priority(node), node.last_use_ns, self._order, node))
        if len(self._heap) > self._compact_at:
            self._compact()

    def holds(self, node: Node) -> bool:
        return node.used_at == node.last_use_ns

    def coldest(self) -> Node:
        while True:
            assert self._heap, "no evictable leaf, although the ledger counted one"
            entry = self._heap[0]
            if _is_live(entry):
                return entry[3]
            heappop(self._heap)
            _forget(entry)

    def next_victims(self, num_blocks: int) -> list[Node]:
        taken: dict[int, tuple[int, int, int, Node]] = {}
        while self._heap and num_blocks > 0:
            entry = heappop(self._heap)
            if _is_live(entry):
                num_blocks -= entry[3].num_blocks if id(entry[3]) not in taken else 0
                taken[id(entry[3])] = entry
            else:
                _forget(entry)
        for entry in taken.values():
            heappush(self._heap, entry)
        return [entry[3] for entry in taken.values()]

    def __len__(self) -> int:
        return len(self._heap)

    def _relink(self, node: Node) -> None:
        self.offer(node)

    def _compact(self) -> None:
        newest = {}
        for entry in self._heap:
            if _is_live(entry):
                newest[id(entry[3])] = entry
            else:
                _forget(entry)
        self._heap = list(newest.values())
        heapify(self._heap)
        self._compact_at = 2 * len(self._heap) + _SLACK


def _priority(node: Node) -> int:
    return 0 if node.retained is None else node.retained.priority


def _forget(entry: tuple[int, int, int, Node]) -> None:
    """A dead entry goes; the leaf needs another one before it can be evicted."""
    if entry[3].used_at == entry[1]:
        entry[3].used_at = NOT_QUEUED


def _is_live(entry: tuple[int, int, int, Node]) -> bool:
    priority, used_ns, _, node = entry
    return node.is_evictable and node.last_use_ns == used_ns and _priority(node) == priority
