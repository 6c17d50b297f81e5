"""Blocks of one pool in one tier: the ledger that says who has them, and the trees that find them again.

A worker has one for its device and, where it has a host tier, one for that. The same content may be in both; each is
closed under prefixes by itself.

What is cut off from a tree is found by nobody from then on. Its memory comes back later, in slices, and first where
blocks are needed:

    retire         a whole tree, which nobody looks up any more
    cut_off        a node and all below it
    free_deferred  free a part of that for one account; what a lease reads stays, and is freed with its last reader
    sweep          the slice of every tick
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from coppice.handles import HANDLE_BYTES
from coppice.ids import TOKEN_BYTES, DomainId, Namespace
from coppice.seals import NO_SEAL, ChainKey, chain_seals
from coppice_cache.core.pool.changes import Changes
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.ledger import Ledger
from coppice_cache.core.pool.quotas import Account, EvictionPlan, Quotas
from coppice_cache.core.radix.incarnations import Incarnations
from coppice_cache.core.radix.partial_match import ChildOrders
from coppice_cache.core.radix.tree import (
    EDGE_BLOCKS_MAX,
    MatchPosition,
    Node,
    Tree,
    add_child,
    is_cut_off,
    path,
    root_of,
    split_edge,
    top_of,
    walk,
)

_CHILDREN_AT_ONCE = 256  # of a node with a million, the rest when it is met again
_CHUNK_BLOCKS = 8  # taken from one domain before asking again which one is furthest over its guarantee


@dataclass(slots=True)
class Sweeping:
    """How far the trees of one store were compared with the latest invalidation."""

    version: int
    trees: list[Tree] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HeldPin:
    """What an operator's pin holds here: `num_blocks` from the root, down to `node`."""

    number: int  # stands for it in the node's pins
    tree: Tree
    node: Node
    num_blocks: int


class BlockStore:
    """Ledger, quotas and trees of one pool."""

    def __init__(
        self, block_size: int, ledger: Ledger, quotas: Quotas, incarnations: Incarnations, changes: Changes
    ) -> None:
        self.num_blocks = ledger.num_blocks
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.ledger = ledger
        self.quotas = quotas
        self.trees: dict[tuple[DomainId, Namespace], Tree] = {}
        self.num_nodes = 0
        self.num_evicted = 0  # blocks, ever
        self.child_orders = ChildOrders()
        self.incarnations = incarnations
        self.changes = changes
        self.sweeping = Sweeping(incarnations.version)
        self.copying: dict[int, Lease] = {}  # ends of copies between tiers, by number; see `offload`

    @property
    def is_open(self) -> bool:
        return True

    def all_leases(self) -> Iterator[Lease]:
        """Whoever has pins and blocks here."""
        yield from self.copying.values()

    def all_pins(self) -> Iterator[HeldPin]:
        """Of operators."""
        yield from ()

    def is_current(self, tree: Tree) -> bool:
        """False once it was invalidated."""
        return tree.stamp == self.incarnations.stamp(tree.domain, tree.namespace)

    def is_findable(self, lease: Lease) -> bool:
        """Neither its tree nor what it is pinned to was invalidated, so what it stores would be found."""
        return lease.tree is not None and self.is_current(lease.tree) and not is_cut_off(lease.node)

    def find_tree(self, domain: DomainId, namespace: Namespace) -> Tree | None:
        tree = self.trees.get((domain, namespace))
        return tree if tree is not None and self.is_current(tree) else None

    def new_tree(self, domain: DomainId, namespace: Namespace, key: ChainKey) -> Tree:
        """Not hung up yet."""
        stamp = self.incarnations.stamp(domain, namespace)
        return Tree(domain, namespace, key, self.block_bytes, stamp)

    def hang_up_tree(self, tree: Tree) -> None:
        """Have it found; an invalidated one of that name makes room."""
        known = self.trees.get((tree.domain, tree.namespace))
        if known is not tree:
            if known is not None:
                self.retire(known)
            self.trees[tree.domain, tree.namespace] = tree

    def split(self, account: Account, position: MatchPosition) -> Node:
        """The node that ends exactly at the position; splits an edge when there is none yet."""
        node = split_edge(position, self.block_bytes)
        if node is not position.node:
            self.num_nodes += 1
            account.eviction.split(node, position.node)
            if node.retained is not None:
                node.retained.nodes.append(node)
        return node

    # pins

    def pin(self, lease: Lease, node: Node) -> None:
        lease.account.protected += node.pin(lease.number)
        lease.node = node

    def unpin(self, lease: Lease, node: Node) -> None:
        lease.account.protected -= node.unpin(lease.number)
        self.offer(lease.account, node)

    def offer(self, account: Account, node: Node) -> None:
        """Something that protected the node may be gone: an orphan is freed then, others may be evicted from now on."""
        while node.handles and node.is_orphan and not node.guards and not node.children:
            assert node.parent is not None  # which may have left before: it does not list an orphan
            parent = node.parent
            account.eviction.left(node)
            self.discard(account, parent, node.leave(self.block_bytes))
            self.num_nodes -= 1
            node = parent
        account.eviction.offer(node)
        if account.deferred_free:
            self._offer_above_cuts(account, node)
        self.drop_if_unused(node)

    def _offer_above_cuts(self, account: Account, node: Node) -> None:
        """What was cut off above the node guards its parent no more, which may be a leaf by now."""
        while (parent := node.parent) is not None:
            if node.is_orphan:
                account.eviction.offer(parent)
            node = parent

    # how blocks enter trees and leave them

    def insert(self, lease: Lease, tokens: bytes, now_ns: int) -> bytes:
        """Have full blocks of a lease found; returns the handles that became CACHED.

            lease      ... node | tokens                                         |
            tree       ... node | already there: walked over | new: becomes CACHED |

        `tokens` are the whole blocks that follow what the lease has settled. The lease keeps its own copy of what was
        there already until it ends.
        """
        assert lease.tree is not None
        block_bytes, old = self.block_bytes, lease.node
        position = walk(old, tokens, block_bytes)
        start, found = lease.num_settled, position.num_blocks
        node, handles = old, b""
        if found:
            lease.add_duplicates(start, start + found)
            node = self.split(lease.account, position)
            passed = path(node)[len(path(old)) :]  # computed by two at once: for the other one that is a use
            lease.account.eviction.touched(
                passed, lease.num_blocks - lease.num_shared, lease.hint, lease.account.cached, now_ns
            )
        rest = tokens[found * block_bytes :]
        if rest:
            handles = lease.handles(start + found, start + len(tokens) // block_bytes)
            parent_seal = NO_SEAL if isinstance(node, Tree) else self.ledger.seal(node.last_block)
            seals = chain_seals(lease.tree.chain_key, parent_seal, rest, block_bytes)
            node = self.store(lease, node, rest, handles, seals, now_ns)
        if node is not old:
            node.last_use_ns = now_ns
            self.pin(lease, node)
            self.unpin(lease, old)
        lease.num_settled = start + len(tokens) // block_bytes
        return handles

    def store(self, lease: Lease, node: Node, tokens: bytes, handles: bytes, seals: bytes, now_ns: int) -> Node:
        """LEASED -> CACHED, findable below `node`; the only entrance, but for what regrows after a restart.

        Returns the node that ends with them. A leaf that is this lease's alone grows in place.
        """
        self.ledger.publish(lease.account, handles, seals)
        if self.changes.are_told:
            assert lease.tree is not None
            parent_seal = self.ledger.seal(node.last_block) if node.handles else b""
            self.changes.stored(lease.tree, parent_seal, tokens, handles, seals)
        alone = node.guards == 1 and len(node.pins) == 1 and lease.number in node.pins and not node.children
        may_grow = alone and node.retained is None  # what follows a range that is kept is not kept with it
        if may_grow and node.handles and len(node.handles) + len(handles) <= EDGE_BLOCKS_MAX * HANDLE_BYTES:
            node.append(tokens, handles)
            lease.account.eviction.grown(node, seals)
            lease.account.protected += len(handles) // HANDLE_BYTES
            node.last_use_ns = now_ns
            return node
        self.num_nodes += 1
        self.child_orders.added(node, tokens[: self.block_bytes])
        child = add_child(node, tokens, handles, block_bytes=self.block_bytes, now_ns=now_ns)
        lease.account.eviction.created(child, seals, lease.num_blocks - lease.num_shared, lease.hint)
        return child

    def hide(self, node: Node) -> None:
        """What hangs at `node` is found by nobody from now on; its blocks stay CACHED until they are discarded.

        Without its edge what hangs below is no prefix of anything, so telling of that is enough.
        """
        self._tell_removed(root_of(node).domain, node, node.handles, all_below=True)
        node.hide(self.block_bytes)

    def discard(self, account: Account, above: Node, handles: bytes) -> None:
        """CACHED -> FREE, of blocks whose node hung below `above` and was trimmed or left; the only exit."""
        self._tell_removed(account.config.domain, above, handles, all_below=False)
        self.ledger.evict(account, handles)

    def _tell_removed(self, domain: DomainId, node: Node, handles: bytes, *, all_below: bool) -> None:
        """A node that was hidden may have lost the way to its root."""
        if self.changes.are_told:
            root = top_of(node)
            namespace = root.namespace if isinstance(root, Tree) else Namespace(b"")
            self.changes.removed(domain, namespace, handles, self.ledger.seals_of(handles), all_below=all_below)

    # eviction

    def make_room(self, account: Account, plan: EvictionPlan) -> None:
        """Carry out a plan that was decided for this domain; it cannot fail."""
        wanted = plan.from_own + plan.from_pool
        if plan.from_own:
            wanted -= self._evict(account, plan.from_own, taker=account)
        while wanted > 0:
            victim = self.quotas.furthest_over()
            if victim is None:
                self._evict(account, wanted, taker=account)
                return
            wanted -= self._evict(victim, min(wanted, victim.lendable, _CHUNK_BLOCKS), taker=account)

    def _evict(self, account: Account, count: int, *, taker: Account) -> int:
        """Free cached blocks of one domain: what was invalidated, then the coldest leaf, its tail block by block.

        `taker` is whom they are for, the domain itself or another one.
        Returns how many became free: what was invalidated goes by whole nodes, so they can be more.
        """
        reaped = 0
        if account.deferred_free:
            reaped = self.free_deferred(account, num_blocks=count)
        freed = max(count, reaped)
        count = freed - reaped
        self.num_evicted += count
        account.evicted_blocks += count
        if taker is not account:
            account.displaced_blocks += count
            taker.displaced_others_blocks += count
        while count:
            node = account.eviction.coldest()
            parent, taken = node.parent, min(count, node.num_blocks)
            assert parent is not None
            first = node.num_blocks - taken
            account.eviction.evicted(node, self.ledger.seal(node.block(first)), is_whole=first == 0)
            self.discard(account, parent, node.trim(taken, self.block_bytes))
            count -= taken
            if not node.handles:
                self.num_nodes -= 1
                account.eviction.offer(parent)
                self.drop_if_unused(parent)
        self.quotas.refresh(account)
        return freed

    def drop_if_unused(self, node: Node) -> None:
        """Forget a tree that has neither nodes nor leases."""
        if isinstance(node, Tree) and node.is_unused and self.trees.get((node.domain, node.namespace)) is node:
            del self.trees[node.domain, node.namespace]

    # what was cut off

    def retire(self, tree: Tree) -> None:
        del self.trees[tree.domain, tree.namespace]
        if tree.children:
            self.quotas.accounts[tree.domain].deferred_free.extend(tree.children.values())

    def cut_off(self, top: Node) -> None:
        """Nobody finds this node or what hangs below it; the memory comes back later."""
        parent, account = top.parent, self.quotas.accounts[root_of(top).domain]
        assert parent is not None
        top.is_orphan = True
        self.hide(top)
        account.deferred_free.append(top)
        self.offer(account, parent)

    def free_deferred(self, account: Account, *, num_blocks: int, num_nodes: float = inf) -> int:
        """Stop when so many blocks are free or so many nodes were looked at; returns the blocks that became free.

        Parents stand below their children on the stack, so each is met again when nothing unread hangs below it.
        """
        before, stack = account.cached, account.deferred_free
        while stack and before - account.cached < num_blocks and num_nodes > 0:
            node = stack[-1]
            num_nodes -= 1
            if node.handles and node.children:
                below = list(
                    islice((child for child in node.children.values() if not child.is_orphan), _CHILDREN_AT_ONCE)
                )
                for child in below:
                    child.is_orphan = True
                if below:
                    stack.extend(below)
                    continue
            stack.pop()
            node.is_orphan = True
            if node.handles and not node.guards:
                self.offer(account, node)
        self.quotas.refresh(account)
        return before - account.cached

    def sweep(self, num_nodes: int) -> None:
        """Find trees that were invalidated and not asked for since, and take apart what was cut off.

        A strict domain waits for nobody: its victims must not depend on what others have to be taken apart.
        """
        sweeping = self.sweeping
        if sweeping.version != self.incarnations.version:
            sweeping.version = self.incarnations.version
            sweeping.trees = list(self.trees.values())
            strict = {account.config.domain for account in self.quotas.accounts.values() if account.is_strict}
            for tree in [tree for tree in sweeping.trees if tree.domain in strict]:
                self._retire_if_old(tree)
        for _ in range(min(num_nodes, len(sweeping.trees))):
            self._retire_if_old(sweeping.trees.pop())
        is_over = False
        for account in self.quotas.accounts.values():
            if account.deferred_free and (account.is_strict or not is_over):
                self.free_deferred(account, num_blocks=self.num_blocks, num_nodes=num_nodes)
                is_over = is_over or not account.is_strict

    def _retire_if_old(self, tree: Tree) -> None:
        if self.trees.get((tree.domain, tree.namespace)) is tree and not self.is_current(tree):
            self.retire(tree)

    def roots(self) -> list[Node]:
        """All nodes hang below these: the trees, what was invalidated, and what left while somebody holds it."""
        roots: list[Node] = list(self.trees.values())
        for account in self.quotas.accounts.values():
            roots.extend(account.deferred_free)
        pinned = [node for lease in self.all_leases() for node in (lease.node, lease.copy_node) if node is not None]
        for node in [*pinned, *(held.node for held in self.all_pins())]:
            if node.is_orphan:
                while node.parent is not None and node.parent.is_orphan:
                    node = node.parent
                roots.append(node)
        return roots
