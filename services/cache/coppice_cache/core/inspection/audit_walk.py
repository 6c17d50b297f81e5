"""The walk of an audit over all nodes of a store, and the marks that it leaves on blocks.

The walk also asks whether the eviction policy holds every leaf without pins (I11). A leaf that is not held when the
walk comes by is a suspect: something above it may have been cut off meanwhile. Suspects are few, and are asked about
once more when the walk is over.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from coppice.handles import HANDLE_BYTES
from coppice.ids import DomainId
from coppice_cache.core.inspection import check
from coppice_cache.core.inspection.check import FEW_BLOCKS, require, require_all
from coppice_cache.core.pool.free_ring import Blocks, blocks_array, unpack_blocks
from coppice_cache.core.pool.ledger import BlockState, Ledger
from coppice_cache.core.pool.quotas import Account
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.sharded_dict import Keys, key_parts
from coppice_cache.core.radix.tree import Node, Tree, is_cut_off

_SUSPECTS_PER_STEP = 256


class Queues:
    """The queues of all domains of one store."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._suspects: dict[str, list[Node]] = {}

    def ask(self, domain: str, leaf: Node) -> None:
        """A leaf that can be evicted at this moment, unless something above it was cut off."""
        account = self._store.quotas.accounts.get(DomainId(domain))
        if account is None or not account.eviction.holds(leaf):
            self._suspects.setdefault(domain, []).append(leaf)

    def confirm(self, account: Account) -> Iterator[None]:
        suspects = self._suspects.pop(account.config.domain, [])
        while suspects:
            part = suspects[-_SUSPECTS_PER_STEP:]
            del suspects[-_SUSPECTS_PER_STEP:]
            missing = [
                leaf for leaf in part if leaf.is_evictable and not account.eviction.holds(leaf) and not is_cut_off(leaf)
            ]
            require(not missing, "I11", f"{len(missing)} leaves of {account.config.domain!r} cannot be evicted")
            yield


_NODES_PER_STEP = 32
_KEYS_PER_STEP = 2_048  # under which nothing stands any more
_LOW_HALF = 0xFFFFFFFF
_UNMARKED, _OWNED, _IN_TREE = 0, 1, 2


class Marks:
    """Per block: state and generation when the audit began; who was found to have it since, under which generation."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._state = np.zeros(ledger.num_blocks, np.uint8)
        self._generation = np.zeros(ledger.num_blocks, np.uint32)  # low half; 2^24 grants do not happen meanwhile
        self._mark = bytearray(ledger.num_blocks)
        self._marked = array("I", bytes(4 * ledger.num_blocks))
        self._marks = np.frombuffer(self._mark, np.uint8)
        self._markeds = np.frombuffer(self._marked, np.uint32)

    def remember(self, blocks: slice) -> None:
        self._state[blocks] = self._ledger.states[blocks]
        self._generation[blocks] = self._ledger.generations[blocks]  # the conversion drops the upper half

    def own(self, blocks: Blocks, number: int) -> None:
        """I7: a lease has these blocks for itself (0: several re-attached ones share one)."""
        self._set(blocks, _OWNED, "I7", f"lease {number} and another one own them")

    def place(self, handles: bytes) -> None:
        """I8: they are in a tree, or left one and are not free yet."""
        if len(handles) > FEW_BLOCKS * HANDLE_BYTES:
            self._set(blocks_array(handles), _IN_TREE, "I8", "twice in trees")
            return
        mark, marked = self._mark, self._marked
        for block in unpack_blocks(handles):
            now = self._ledger.generation[block] & _LOW_HALF
            require(mark[block] != _IN_TREE or marked[block] != now, "I8", f"twice in trees: blocks [{block}]")
            mark[block], marked[block] = _IN_TREE, now

    def _set(self, blocks: Blocks, mark: int, name: str, evidence: str) -> None:
        now = self._ledger.generations[blocks].astype(np.uint32)
        twice = (self._marks[blocks] == mark) & (self._markeds[blocks] == now)
        require_all(~twice, name, evidence, blocks)
        require(len(set(blocks.tolist())) == len(blocks), name, evidence)
        self._marks[blocks] = mark
        self._markeds[blocks] = now

    def place_again(self, handles: bytes) -> bool:
        """The same without asking who had them before; whether all of them were found in a tree already."""
        blocks = blocks_array(handles)
        now = self._ledger.generations[blocks].astype(np.uint32)
        known = bool(((self._marks[blocks] == _IN_TREE) & (self._markeds[blocks] == now)).all())
        self._marks[blocks] = _IN_TREE
        self._markeds[blocks] = now
        return known

    def judge(self, blocks: slice, *, is_open: bool, stood_still: bool) -> None:
        """I1: what was leased, draining or cached all the time must have been found. In a ledger that is not open
        what nobody has drains, and leases come back to it, so it is judged only when it stood still.
        """
        if not is_open and not stood_still:
            return
        ledger = self._ledger
        state, generation = ledger.states[blocks], ledger.generations[blocks].astype(np.uint32)
        is_same = (state == self._state[blocks]) & (generation == self._generation[blocks])
        mark = np.where(self._markeds[blocks] == generation, self._marks[blocks], _UNMARKED)
        is_leased = (state == BlockState.LEASED) | (state == BlockState.DRAINING)
        should_be = np.where(state == BlockState.CACHED, _IN_TREE, np.where(is_leased, _OWNED, _UNMARKED))
        if not is_open:
            nobodys = mark == _UNMARKED
            should_be = np.where(nobodys & (state == BlockState.DRAINING), _UNMARKED, should_be)
            should_be = np.where(nobodys & (state == BlockState.FREE), _OWNED, should_be)
        right = ~is_same | (mark == should_be) | ((state == BlockState.FREE) & is_open)
        everything = np.arange(blocks.start, blocks.stop)
        require_all(right, "I1", "the ledger has another state than leases and trees", everything)


class TreeWalk:
    """Every node of a store once, parents before children.

    What is cut off from its tree hangs below places that are gathered first, so that nothing is met on two ways. What
    is cut off later may be missed, and is looked up in the end.
    """

    def __init__(self, store: BlockStore, marks: Marks, queues: Queues) -> None:
        self._store = store
        self._marks = marks
        self._queues = queues
        self._tops: dict[Node, str] = {}  # where walks begin: roots, and what is cut off from them; with its domain
        self._stack: list[tuple[Node, Keys]] = []  # keys that are still to be looked up
        self.num_nodes = 0
        self.guarded: dict[str, list[Node]] = {}  # by domain, with pins or guards when they were seen

    def steps(self) -> Iterator[None]:
        yield from self._gather(self._tops)
        trees = list(self._store.trees.items())
        for top, domain in list(self._tops.items()):
            yield from self._walk(top, domain)
        for key, tree in trees:
            if self._store.trees.get(key) is tree:
                check.check_root(self._store, key, tree)
            if tree not in self._tops:
                self._tops[tree] = key[0]
                yield from self._walk(tree, key[0])
        cut_since: dict[Node, str] = {}
        yield from self._gather(cut_since)
        for top, domain in cut_since.items():
            if top not in self._tops:
                yield from self._look_again(top, domain)

    def _cut_off(self) -> list[tuple[str, Node]]:
        accounts = self._store.quotas.accounts.values()
        return [(account.config.domain, node) for account in accounts for node in account.deferred_free]

    def _walk(self, top: Node, domain: str) -> Iterator[None]:
        """All that is listed below `top`, itself included."""
        if top.handles:
            self._visit(top, domain)
        self._stack.extend((top, keys) for keys in key_parts(top.children))
        yield
        nodes_left, keys_left = _NODES_PER_STEP, _KEYS_PER_STEP
        while self._stack:
            parent, keys = self._stack[-1]
            if isinstance(keys, dict):
                keys = list(keys)
                self._stack[-1] = (parent, keys)
            if not keys:
                self._stack.pop()
                continue
            key = keys.pop()
            child = parent.children.get(key)
            if child is not None:
                check.check_listed(self._store, domain, parent, key, child)
                self._visit(child, domain)
                if child.children:
                    self._stack.extend((child, part) for part in key_parts(child.children))
                nodes_left -= 1
            keys_left -= 1
            if not nodes_left or not keys_left:
                yield
                nodes_left, keys_left = _NODES_PER_STEP, _KEYS_PER_STEP

    def _visit(self, node: Node, domain: str) -> None:
        check.check_node(self._store, domain, node)
        self._marks.place(node.handles)
        self._collect(node, domain)

    def _collect(self, node: Node, domain: str) -> None:
        self.num_nodes += 1
        if node.guards or node.pins:
            self.guarded.setdefault(domain, []).append(node)
        elif not node.children and not node.is_orphan:
            self._queues.ask(domain, node)

    # ---- what no walk finds

    def _gather(self, tops: dict[Node, str]) -> Iterator[None]:
        """Where paths are cut off: above what waits to be freed, and above the pins of leases and operators."""
        for index, (domain, node) in enumerate(self._cut_off()):
            if node.handles:
                self._gather_above(node, domain, tops)
            if index % _NODES_PER_STEP == 0:
                yield
        for lease in list(self._store.all_leases()):
            for end in (lease.node, lease.copy_node):
                if lease.tree is not None and end is not None:
                    self._gather_above(end, lease.tree.domain, tops)
            yield
        for held in list(self._store.all_pins()):
            self._gather_above(held.node, held.tree.domain, tops)
            yield

    def _gather_above(self, node: Node, domain: str, tops: dict[Node, str]) -> None:
        for top in check.upwards(node):
            if isinstance(top, Tree):
                is_current = self._store.trees.get((top.domain, top.namespace)) is top
            else:
                is_current = not top.handles or check.is_listed(top, self._store.block_bytes)
            if not is_current and top not in tops:
                check.check_hidden(self._store, top)
                tops[top] = domain

    def _look_again(self, top: Node, domain: str) -> Iterator[None]:
        """Below what was cut off since the walk began. The walk had seen it before that, or had not come by yet: being
        there twice means nothing.
        """
        waiting = [top]
        num_seen = 0
        while waiting:
            node = waiting.pop()
            if node.handles:
                check.check_node(self._store, domain, node)
                if not self._marks.place_again(node.handles):
                    self._collect(node, domain)
            waiting.extend(node.children.values())
            num_seen += 1
            if num_seen % _NODES_PER_STEP == 0:
                yield
