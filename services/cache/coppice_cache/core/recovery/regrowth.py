"""The opening of a worker after a restart: what the log says meets what the worker has, and leases find their places.

    claims judged, window fenced, arrays seen twice        all blocks drain, or are held by re-attached leases
      entries  generation and seal equal the worker's, and so do all above them, else they are forgotten
      leases   deepest block of theirs that is such an entry, at its depth: the pin; what lies above is on its path
                 A  [a b c | d e]     a b c on the path, d e its own: may publish from d on
                 B  [a b | x]         x is held by others too, and in no tree: stays held, B does not publish (rule 6)
      ledger   entries become CACHED, what nobody holds is FREE, the rest stays with its leases

Trees are compared with the *second* arrays only (rule 8): until the fence was acknowledged, late plans may have opened
newer occupancies. Nothing of it can be found before. An entry that some lease holds without having it on its path
contradicts that lease, so it is forgotten with all below it: a lease knows better than a log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from coppice.handles import BLOCK_BITS, HANDLE_BYTES, UInt64
from coppice.ids import LeaseId, SchedulerEpoch
from coppice.messages.index import Reattached
from coppice_cache.core.base.errors import OpRefused
from coppice_cache.core.base.events import Tier
from coppice_cache.core.base.results import Regrown
from coppice_cache.core.base.settings import Mode
from coppice_cache.core.ops.pins import extend_pins
from coppice_cache.core.pool.free_ring import Blocks
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.quotas import Account, EvictionPlan
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.tree import MatchPosition, Node, Tree
from coppice_cache.core.recovery.entries import Bool, Entries
from coppice_cache.core.state.replay import Forest, Ints, ReplayCounts
from coppice_cache.core.state.state import State
from coppice_cache.core.state.workers import Phase, Worker


@dataclass(slots=True)
class _Place:
    """Where a lease stands: `num_settled` blocks down, at or on the edge of node `node` of the forest (-1: at a root).

    `differs` marks its blocks above that whose content the tree has in other blocks; `rest` are all its blocks that
    are not on the path.
    """

    lease: Lease
    num_settled: int
    node: int
    differs: Bool
    on_path: Blocks
    rest: Blocks


def open_worker(state: State, worker: Worker, now_ns: int, *, knows_below: tuple[bool, ...]) -> None:
    """CLOSING -> OPEN: the window's fence was acknowledged and the ledger is what the worker has now, and so are those
    of its lower tiers that `knows_below` says."""
    entries = Entries(worker, state.replay.take(worker.worker_id, worker.epoch, Tier.DEVICE))
    below = [
        (tier, store, _of_tier(state, worker, tier))
        for tier, store, is_known in zip(Tier, worker.stores, (False, *knows_below), strict=False)
        if is_known
    ]
    state.drop_replay(worker.worker_id)
    counts = state.replay.counts
    accounts = _uses(state, worker, entries.forest)
    entries.judge([account is not None for account in accounts], counts)
    places = _place_all(worker, entries, counts)
    worker.phase = Phase.OPEN
    worker.ledger.open({*worker.holders, *entries.blocks[entries.alive].tolist()})
    nodes = _hang_up(state, entries, accounts, now_ns)
    for tier, store, forest in below:  # before leases that make trees: these take their chain keys
        _regrow_below(state, worker, tier, store, forest, now_ns)
    for place in places:
        _place_lease(state, worker, entries, place)
    for tree in tuple(worker.trees.values()):
        extend_pins(state, worker, tree)
    _report(state, places, counts)
    counts.replayed += _offer(worker, entries, accounts, nodes, counts)
    if any(store.num_nodes for store in worker.stores):
        state.effects.append(Regrown(worker.worker_id))


def _of_tier(state: State, worker: Worker, tier: Tier) -> Forest:
    """What the log has of it. That of a disk may be set aside by now, as the worker took long to come back."""
    forest = state.aside.take(worker.worker_id, worker.epoch) if tier is Tier.DISK else None
    return forest or state.replay.take(worker.worker_id, worker.epoch, tier)


def regrow_disk(state: State, worker: Worker, forest: Forest, now_ns: int) -> None:
    """At the registration of a new epoch that keeps its disk: no lease or copy is there, so it is compared at once."""
    store = worker.stores[Tier.DISK]
    _regrow_below(state, worker, Tier.DISK, store, forest, now_ns)
    if store.num_nodes:
        state.effects.append(Regrown(worker.worker_id))


def _regrow_below(state: State, worker: Worker, tier: Tier, store: BlockStore, forest: Forest, now_ns: int) -> None:
    """The same in a lower tier, where no lease is.

    The window's fence waited for the copies that were under way, so its arrays show what they wrote. What asks for
    zeroing by now is not kept there, and one tree has one chain key in all tiers.
    """
    if not len(forest.handles):
        return
    counts, entries = state.replay.counts, Entries(store, forest)
    accounts = _uses(state, store, forest, is_below=True)
    for index, tree in enumerate(forest.trees):
        found = [above.trees.get((tree.domain, tree.namespace)) for above in worker.stores[: tier.value]]
        if any(other is not None and other.chain_key != tree.chain_key for other in found):
            accounts[index] = None
    entries.judge([account is not None for account in accounts], counts)
    store.ledger.close()
    store.ledger.open(set(entries.blocks[entries.alive].tolist()))
    nodes = _hang_up(state, entries, accounts, now_ns)
    num_left = _offer(store, entries, accounts, nodes, counts)
    counts.replayed_to_host += num_left if tier is Tier.HOST else 0
    counts.replayed_to_disk += num_left if tier is Tier.DISK else 0


def _uses(state: State, store: BlockStore, forest: Forest, *, is_below: bool = False) -> list[Account | None]:
    """Per tree the account of its domain as it is configured now; None where nothing may be found."""
    fits = forest.block_bytes == store.block_bytes
    store.quotas.forget_idle()  # now, as accounts that are made here hold nothing before their trees are hung up
    return [_account_of(state, store, tree, is_below=is_below) if fits else None for tree in forest.trees]


def _account_of(state: State, store: BlockStore, tree: Tree, *, is_below: bool) -> Account | None:
    if not store.is_current(tree):
        return None
    try:
        config = state.domains.config(tree.domain)
    except OpRefused:
        return None
    is_kept = not config.wipes if is_below else config.mode is not Mode.DISABLED
    if not is_kept or not store.quotas.has_place(config.domain, state.settings.domains_per_worker_max):
        return None
    return store.quotas.use_of(config.by_shares() if is_below else config)


# leases


def _place_all(worker: Worker, entries: Entries, counts: ReplayCounts) -> list[_Place]:
    """Every lease at its place, and no entry that a lease holds beside its path."""
    leases = [lease for lease in worker.leases.values() if lease.tree is None]
    while True:
        places = [_place(entries, lease) for lease in leases]
        if not len(entries.alive):
            return places
        beside = np.concatenate([np.zeros(0, np.int64), *(entries.of_blocks(place.rest) for place in places)])
        beside = np.unique(beside[beside >= 0])
        if not len(beside):
            return places
        before = int(entries.alive.sum())
        entries.forget(beside)
        counts.refused_parent += before - int(entries.alive.sum())


def _place(entries: Entries, lease: Lease) -> _Place:
    handles = np.frombuffer(bytes(lease.table), "<u8")
    blocks = handles.view(np.int64) & ((1 << BLOCK_BITS) - 1)
    nowhere = _Place(lease, 0, -1, np.zeros(0, np.bool_), blocks[:0], blocks)
    if not _may_be_settled(entries, lease, handles, blocks):
        return nowhere
    found = entries.of_blocks(blocks)
    tree = entries.trees.get((lease.account.config.domain, lease.namespace), -1)
    fits = (found >= 0) & (entries.forest.depth[found] == np.arange(len(found)))
    fits &= entries.node_tree[entries.forest.node_of[found]] == tree
    if not fits.any():
        return nowhere
    num_settled = int(np.flatnonzero(fits)[-1]) + 1
    node = int(entries.forest.node_of[found[num_settled - 1]])
    differs = entries.forest.handles[entries.path(node, num_settled)] != handles[:num_settled]
    if differs[: lease.num_shared].any():
        return nowhere
    rest = np.concatenate([blocks[:num_settled][differs], blocks[num_settled:]])
    return _Place(lease, num_settled, node, differs, blocks[:num_settled][~differs], rest)


def _may_be_settled(entries: Entries, lease: Lease, handles: UInt64, blocks: Blocks) -> bool:
    """A lease with a block that is someone else's by now is over, and what it says of the rest counts for nothing."""
    if not len(entries.alive) or lease.account.config.mode is Mode.DISABLED:
        return False
    return bool((entries.store.ledger.generations[blocks] == handles >> np.uint64(BLOCK_BITS)).all())


def _place_lease(state: State, worker: Worker, entries: Entries, place: _Place) -> None:
    """Pin the lease, and make its own what only it holds; else that stays held."""
    lease = place.lease
    _let_go(worker, lease, place.on_path)
    alone = all(len(worker.holders[block]) == 1 for block in place.rest.tolist())
    may_publish = alone and lease.account.config.mode is not Mode.DISABLED and _is_current(worker, lease)
    lease.held = place.rest.tolist()
    lease.num_settled = place.num_settled
    if may_publish:
        _let_go(worker, lease, place.rest)
        lease.held = []
        for start, stop in _runs(place.differs):
            lease.add_duplicates(start, stop)
    if may_publish or place.num_settled:
        lease.tree = _find_tree(state, worker, lease)
        worker.pin(lease, _node_at(entries, place, lease.tree))


def _is_current(worker: Worker, lease: Lease) -> bool:
    handles = np.frombuffer(bytes(lease.table), "<u8")
    blocks = handles.view(np.int64) & ((1 << BLOCK_BITS) - 1)
    return bool((worker.ledger.generations[blocks] == handles >> np.uint64(BLOCK_BITS)).all())


def _let_go(worker: Worker, lease: Lease, blocks: Blocks) -> None:
    for block in blocks.tolist():
        holders = worker.holders[block]
        del holders[lease.number]
        if not holders:
            del worker.holders[block]


def _runs(mask: Bool) -> Iterator[tuple[int, int]]:
    """Where the mask is set, as [start, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _find_tree(state: State, worker: Worker, lease: Lease) -> Tree:
    domain, namespace = lease.account.config.domain, lease.namespace
    tree = worker.find_tree(domain, namespace)
    if tree is None:
        tree = worker.new_tree(domain, namespace, state.chain_key_at(worker, domain, namespace))
        worker.hang_up_tree(tree)
    return tree


def _node_at(entries: Entries, place: _Place, tree: Tree) -> Node:
    """The node that ends where the lease's settled part does; the edge may have been split for another lease before."""
    if place.node < 0:
        return tree
    node: Node = entries.forest.nodes[place.node]
    end = int(entries.forest.depth[entries.starts[place.node]]) + entries.num_alive(place.node)
    while end - node.num_blocks >= place.num_settled:
        end -= node.num_blocks
        assert node.parent is not None
        node = node.parent
    into = place.num_settled - (end - node.num_blocks)
    return entries.store.split(place.lease.account, MatchPosition(node, into, place.num_settled))


def _report(state: State, places: list[_Place], counts: ReplayCounts) -> None:
    """Tell each session which of its leases may publish again, and from where."""
    by_epoch: dict[SchedulerEpoch, list[tuple[LeaseId, int]]] = {}
    for place in places:
        lease = place.lease
        counts.leases_pinned += place.num_settled > 0
        if lease.may_publish and not lease.draining:
            counts.leases_publishing += 1
            by_epoch.setdefault(lease.epoch, []).append((lease.lease_id, lease.num_settled))
    for epoch, settled in by_epoch.items():
        ids, nums = tuple(lease_id for lease_id, _ in settled), tuple(num for _, num in settled)
        state.tell_client(epoch, Reattached(state.cache_epoch, ids, (), nums))


# trees


def _hang_up(state: State, entries: Entries, accounts: list[Account | None], now_ns: int) -> list[int]:
    """Cut the trees down to what counts and have them found; returns the nodes that are left, by index."""
    store, forest = entries.store, entries.forest
    num_alive = np.bincount(forest.node_of[entries.alive], minlength=len(forest.nodes))
    _cut(state, entries, num_alive)
    bounds = np.searchsorted(entries.node_tree[forest.node_of], np.arange(len(forest.trees) + 1)).tolist()
    for (start, stop), tree, account in zip(pairwise(bounds), forest.trees, accounts, strict=True):
        mine = entries.blocks[start:stop][entries.alive[start:stop]]
        if account is not None and len(mine):
            store.ledger.restore(account, mine)
            store.hang_up_tree(tree)
        else:
            state.dismantling.append(tree)
    left: list[int] = np.flatnonzero(num_alive).tolist()
    store.num_nodes += len(left)
    for index in left:
        forest.nodes[index].last_use_ns = now_ns
    return left


def _cut(state: State, entries: Entries, num_alive: Ints) -> None:
    forest = entries.forest
    whole = (num_alive == entries.sizes).tolist()
    for index in np.flatnonzero(num_alive < entries.sizes).tolist():
        node, keep, above = forest.nodes[index], int(num_alive[index]), forest.node_parent[index]
        if above < 0 or whole[above]:
            if not keep:
                node.hide(forest.block_bytes)
                state.dismantling.append(node)
                continue
            for key, child in tuple(node.children.items()):
                node.unlist_child(key, child)
                state.dismantling.append(child)
            node.tokens = node.tokens[: keep * forest.block_bytes]
            node.handles = node.handles[: keep * HANDLE_BYTES]


def _offer(
    store: BlockStore, entries: Entries, accounts: list[Account | None], nodes: list[int], counts: ReplayCounts
) -> int:
    """What nobody reads may be evicted, the earliest of the log first, and at once what is over a maximum by now.

    Returns how many blocks are left.
    """
    forest, num_left = entries.forest, int(entries.alive.sum())
    for index in sorted(nodes, key=forest.node_number.__getitem__):
        account = accounts[forest.node_tree[index]]
        assert account is not None
        account.eviction.offer(forest.nodes[index])
    for account in store.quotas.accounts.values():
        store.quotas.refresh(account)
        excess = min(account.held - account.maximum, account.evictable)
        if excess > 0:
            store.make_room(account, EvictionPlan(from_own=excess, from_pool=0))
            counts.refused_domain += excess
            num_left -= excess
        if account.held > account.maximum:
            account.reattached_peak = max(account.reattached_peak, account.held)
    return num_left
