"""The tiers below the device: what is demoted there before the store above has to forget it, and promoted again when it
is asked for.

    device    ... [a b c]          coldest leaf, few blocks are free      --- DEMOTE --->   host   ... [a b c]
    host      ... [a b c]          a prompt goes on with a b c            -- PROMOTE --->   device ... [a b c]

The same between host and disk (STORE, LOAD). What a prompt finds on the disk comes in two hops: whoever waited for the
first is woken, asks again, and waits for the second.

Each tier has trees of its own, closed under prefixes. A copy is an order to the worker and a lease on either end: a pin
on what is read, owned blocks for what is written. Until the worker says that it is done neither end can be evicted or
granted; then the written end is published like any lease's blocks. A demoted block stays in the upper store until it is
evicted there, which takes no time by then.

What a copy reads below, and what it continues there, counts as used: no request asks a lower tier itself. What is
copied down stays as cold as it is above.

A promotion is a flight: whoever asks for that prefix is told to wait for it, like for a live lease that computes it.
"""

from __future__ import annotations

from functools import partial

from coppice.handles import HANDLE_BYTES
from coppice.ids import DomainId, LeaseId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import Grant
from coppice.messages.registration import NOTHING_LOST, CopiesDone, CopyOrder, Direction
from coppice.seals import SEAL_BYTES
from coppice_cache.core.eviction.policy import NO_HINT
from coppice_cache.core.ops.invalidation import cut
from coppice_cache.core.ops.pins import extend_pins
from coppice_cache.core.pool.free_ring import unpack_blocks
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.quotas import Account, EvictionPlan
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.tree import (
    NEVER_COPIED,
    MatchPosition,
    Node,
    Tree,
    is_cut_off,
    path,
    root_of,
    unprotected_blocks,
    walk,
)
from coppice_cache.core.state.state import NS_PER_MS, State
from coppice_cache.core.state.workers import CopyJob, LowerTier, Worker

_US_PER_MS = 1_000
_SHARE_OF_A_WAIT = 1 / 8  # for which promotions may fill the link
_LOOKS_PER_WINDOW = 4  # of what is copied ahead of need: so much of it may be taken before more is
_NO_ID = LeaseId(b"")
_NO_EPOCH = SchedulerEpoch(0)
_NO_GRANT = Grant(_NO_ID, WorkerId(""), WorkerEpoch(0), 0, b"", b"", b"", b"")


def match_below(
    tier: LowerTier | None, domain: DomainId, namespace: Namespace, tokens: bytes, stop: int
) -> MatchPosition | None:
    """Where a walk of the tier's trees ends; None without such a tier, or a tree there."""
    tree = None if tier is None else tier.store.find_tree(domain, namespace)
    return None if tier is None or tree is None else walk(tree, tokens, tier.store.block_bytes, stop)


def promote(
    state: State,
    worker: Worker,
    tier: LowerTier,
    tree: Tree,
    position: MatchPosition,
    account: Account,
    tokens: bytes,
    num_blocks: int,
    least: int,
) -> bool:
    """Order the `num_blocks` that the tier has beyond `position`, in a tree of the store above it; where the link is
    busy some of them, `least` at least.

    Returns whether it was worth it and there was room.
    """
    upper, lower = tier.upper, tier.store
    count = min(num_blocks, _promotions_left(state, tier))
    if _is_waited_for(worker, upper) or count < max(1, least):
        return False
    costs = tier.costs_of(tier.up, state.call_time.now_ns)
    if not costs.is_worth_promoting(count, worker.block_size, blocks_ahead(tier, tree.domain)):
        return False
    plan = upper.quotas.plan(
        account, count, num_free=upper.ledger.num_free, newly_protected=unprotected_blocks(position)
    )
    if not isinstance(plan, EvictionPlan):
        return False
    end = (position.num_blocks + count) * worker.block_bytes
    found = match_below(tier, tree.domain, tree.namespace, tokens, end)
    assert found is not None
    assert found.num_blocks == position.num_blocks + count, "the tier has less than was said"
    target = _claim(state, worker, upper, account, tree, position, plan, count)
    lower_use = lower.quotas.accounts[tree.domain]
    read_to = lower.split(lower_use, found)
    _used(state, lower_use, read_to, new_blocks=0)
    source = _hold(state, lower, lower_use, root_of(found.node), read_to, found.num_blocks)
    _order(state, worker, tier, tier.up, source, target, tokens[:end])
    worker.flights.start(target, tokens[:end], partial(lower.is_findable, source))
    return True


def tick_demotions(state: State, worker: Worker) -> None:
    """At every tick."""
    for tier in worker.lower_tiers:
        tier.ticked()
        _plan_demotions(state, worker, tier)


def demote_ahead(state: State, worker: Worker) -> None:
    """After evictions: once they took a good part of what was copied ahead of them, not only at the next tick."""
    for tier in worker.lower_tiers:
        if tier.upper.num_evicted >= tier.look_at:
            _plan_demotions(state, worker, tier)


def _plan_demotions(state: State, worker: Worker, tier: LowerTier) -> None:
    """While few blocks are free above, copy the next victims down: as many as the share of the pool says, and as a
    burst took lately.

    What is under way cannot be evicted, so it has to be over before its turn comes, else warmer blocks go in its place,
    and there is a bound to it.
    """
    upper = tier.upper
    settings, most = state.settings, min(state.settings.demote_blocks_max, upper.num_blocks // 2)
    ahead = int(settings.demote_below_share * upper.num_blocks + tier.burst)
    wanted = ahead - upper.ledger.num_free
    tier.look_at = upper.num_evicted + max(1, min(ahead, most) // _LOOKS_PER_WINDOW)
    tier.is_short = False
    if wanted <= 0 or not worker.is_open or state.reincarnating or _is_waited_for(worker, upper):
        return
    if state.call_time.now_ns < tier.rests_until_ns:
        return
    num_orders, num_blocks = tier.copying(tier.down)
    orders_left, blocks_left = settings.copy_orders_max - num_orders, most - num_blocks
    # A copy holds its source for as long as the worker takes, which a strict domain could feel, and nobody zeroes
    # blocks below the device: who asks for that stays there (I15).
    lending = [account for account in upper.quotas.accounts.values() if account.evictable and not account.config.wipes]
    for account in sorted(lending, key=lambda account: -account.over):
        for node in account.eviction.next_victims(wanted):
            wanted -= node.num_blocks
            if node.copied_use_ns == node.last_use_ns:
                continue
            tier.is_short = orders_left <= 0 or blocks_left <= 0
            if tier.is_short:
                return
            num_ordered = _demote(state, worker, tier, account, node, blocks_max=blocks_left)
            orders_left, blocks_left = orders_left - (num_ordered > 0), blocks_left - num_ordered
            tier.is_short = blocks_left <= 0  # of this path, too


def _is_waited_for(worker: Worker, store: BlockStore) -> bool:
    """Somebody waits for blocks of this store to come back; on the device alone, where leases are."""
    return store is worker and bool(worker.reservations.waiting)


def copies_done(state: State, worker: Worker, message: CopiesDone, now_ns: int) -> None:
    """The worker's word on orders; one that is unknown, or was answered before, changes nothing."""
    for tier, copy_ns in zip(worker.lower_tiers, (message.copy_ns_per_block, message.disk_ns_per_block), strict=False):
        tier.costs = tier.costs.measured(message.prefill_ns_per_token, copy_ns)
        if _end_jobs(state, worker, tier, message, now_ns) and tier.is_short:  # what failed waits for the next tick
            _plan_demotions(state, worker, tier)


def _end_jobs(state: State, worker: Worker, tier: LowerTier, message: CopiesDone, now_ns: int) -> bool:
    """Those of one tier. Returns whether one was done, which has made place for another."""
    has_made_place = False
    lost_from = dict(zip(message.failed_ids, message.lost_from, strict=False))
    for order_id in (*message.order_ids, *message.failed_ids):
        job = tier.jobs.pop(order_id, None)
        if job is None:
            continue
        demoted = job.order.direction is tier.down
        from_store, to_store = (tier.upper, tier.store) if demoted else (tier.store, tier.upper)
        is_done = order_id in message.order_ids
        has_made_place |= is_done
        if is_done:
            tier.num_copied[job.order.direction] += len(job.order.dst) // HANDLE_BYTES
            if from_store.is_findable(job.source):  # what was invalidated may not come back through the other tier
                _store(state, to_store, job, now_ns)
            if to_store is worker and job.target.tree is not None:
                extend_pins(state, worker, job.target.tree)
            worker.flights.advance(job.target)
        elif demoted:
            job.source.node.copied_use_ns = NEVER_COPIED  # what stood in the way may be gone by the next look
            tier.rests_until_ns = now_ns + tier.rest_ms * NS_PER_MS
        elif (index := lost_from.get(order_id, 0)) == NOTHING_LOST:
            tier.keeps_until_ns = now_ns + tier.rest_ms * NS_PER_MS
        else:
            _forget(from_store, job, index)
        worker.flights.end(job.target)
        _let_go(to_store, job.target)
        _let_go(from_store, job.source)
        if is_done:
            _note_seals(to_store, job.order)
    return has_made_place


def _demote(state: State, worker: Worker, tier: LowerTier, account: Account, node: Node, *, blocks_max: int) -> int:
    """Copy what of the path to this leaf is not in the lower tier yet, unless it is not worth it or nothing has room;
    returns how many blocks are ordered.

    Once for each use: where the tier holds less than the victims, it has dropped some again, and copying those would
    drop others, for ever.
    """
    upper, lower = tier.upper, tier.store
    has_place = lower.quotas.makes_place(account.config.domain, state.settings.domains_per_worker_max)
    if is_cut_off(node) or not has_place:
        return 0  # invalidated, and not taken apart yet; or the accounts of the tier are full
    tree, nodes = root_of(node), path(node)
    if not upper.is_current(tree):
        return 0  # nor is that below used for it
    costs, path_blocks = tier.costs_of(tier.down, state.call_time.now_ns), sum(part.num_blocks for part in nodes)
    if not costs.is_worth_demoting(path_blocks, worker.block_size):
        return 0  # a part of it even less
    tokens = b"".join(part.tokens for part in nodes)
    lower_use = lower.quotas.use_of(account.config.by_shares())
    there = lower.find_tree(tree.domain, tree.namespace)
    if there is None:
        there = lower.new_tree(tree.domain, tree.namespace, tree.chain_key)
    position = walk(there, tokens, worker.block_bytes)
    missing = path_blocks - position.num_blocks
    if not missing:
        if node.copied_use_ns != NEVER_COPIED:  # else it came up from there, or went down with what hung below it
            copied = lower.split(lower_use, position)
            _used(state, lower_use, copied, new_blocks=0)
            lower.offer(lower_use, copied)
        node.copied_use_ns = node.last_use_ns
    count = min(missing, blocks_max)
    if not count:
        return 0
    if not costs.is_worth_demoting(count, worker.block_size):
        return 0
    plan = lower.quotas.plan(
        lower_use, count, num_free=lower.ledger.num_free, newly_protected=unprotected_blocks(position)
    )
    if not isinstance(plan, EvictionPlan):
        return 0
    target = _claim(state, worker, lower, lower_use, there, position, plan, count)
    source = _hold(state, upper, account, tree, node, path_blocks)
    _order(state, worker, tier, tier.down, source, target, tokens)
    if count == missing:
        node.copied_use_ns = node.last_use_ns
    return count


def blocks_ahead(tier: LowerTier, domain: DomainId) -> int:
    """Blocks that are promoted first, for others. Of its own each request would stand behind as much computing."""
    return tier.copying(tier.up, but_for=tier.store.quotas.accounts.get(domain))[1]


def _promotions_left(state: State, tier: LowerTier) -> int:
    """Blocks that the link can bring soon: they stand still until then, and whoever waits for them, too."""
    num_orders, num_blocks = tier.copying(tier.up)
    if num_orders >= state.settings.copy_orders_max:
        return 0
    bound_us = state.settings.flight_wait_ms * _US_PER_MS * _SHARE_OF_A_WAIT
    return int(bound_us / tier.costs_of(tier.up, state.call_time.now_ns).copy_us_per_block) - num_blocks


def _order(
    state: State,
    worker: Worker,
    tier: LowerTier,
    direction: Direction,
    source: Lease,
    target: Lease,
    tokens: bytes,
) -> None:
    """Copy what the target owns; `tokens` are those of its whole path, from the root."""
    read_from = tier.upper if direction is tier.down else tier.store
    src, dst = source.handles(target.num_settled, target.num_blocks), target.own_handles()
    order = CopyOrder(state.next_order_id(), direction, src, dst, read_from.ledger.seals_of(src))
    copied = tokens[target.num_settled * worker.block_bytes : target.num_blocks * worker.block_bytes]
    tier.tried_ns[direction] = state.call_time.now_ns
    tier.jobs[order.order_id] = CopyJob(order, source, target, copied)
    state.order_copy(worker, order)


def _used(state: State, account: Account, node: Node, *, new_blocks: int) -> None:
    """The path to `node` was used in a lower tier; whoever calls has it pinned next, or offered."""
    now_ns = state.call_time.now_ns
    account.eviction.touched(path(node), new_blocks, NO_HINT, account.cached, now_ns)
    node.last_use_ns = now_ns


def _claim(
    state: State,
    worker: Worker,
    store: BlockStore,
    account: Account,
    tree: Tree,
    position: MatchPosition,
    plan: EvictionPlan,
    count: int,
) -> Lease:
    """The written end: a pin at the position, and `count` blocks that follow it."""
    store.hang_up_tree(tree)
    node = store.split(account, position)
    if store is not worker:  # on the device the request that waits uses it
        _used(state, account, node, new_blocks=count)
    target = _hold(state, store, account, tree, node, position.num_blocks)
    store.make_room(account, plan)
    target.table += store.ledger.grant(account, count).owned
    store.quotas.refresh(account)
    return target


def _hold(state: State, store: BlockStore, account: Account, tree: Tree, node: Node, num_blocks: int) -> Lease:
    """A lease of nobody's session: a pin on `node`, which ends `num_blocks` from its root."""
    table = bytearray(b"".join(part.handles for part in path(node)))
    lease = Lease(
        number=state.next_lease_number(),
        lease_id=_NO_ID,
        epoch=_NO_EPOCH,
        account=account,
        namespace=tree.namespace,
        node=node,
        table=table,
        num_shared=num_blocks,
        num_settled=num_blocks,
        granted_ns=0,
        grant=_NO_GRANT,
        tree=tree,
    )
    store.copying[lease.number] = lease
    store.pin(lease, node)
    store.quotas.refresh(account)
    return lease


def _store(state: State, store: BlockStore, job: CopyJob, now_ns: int) -> None:
    """The written end is full: publish it, unless its place was invalidated meanwhile."""
    target = job.target
    if store.is_findable(target):
        store.insert(target, job.tokens, now_ns)
        store.quotas.refresh(target.account)


def _forget(store: BlockStore, job: CopyJob, index: int) -> None:
    """The lower tier has lost what it was to read from this block of the order on: whoever asks computes, and is not
    made to wait for another attempt."""
    source, num_blocks = job.source, len(job.order.src) // HANDLE_BYTES
    if index < num_blocks and source.tree is not None and store.is_findable(source):
        first = source.num_settled - num_blocks + index
        tokens = b"".join(part.tokens for part in path(source.node))
        position = walk(source.tree, tokens, store.block_bytes, (first + 1) * store.block_bytes)
        cut(store, MatchPosition(position.node, position.blocks_into - 1, 0))


def _note_seals(store: BlockStore, order: CopyOrder) -> None:
    """The worker has sealed all that it wrote, and will report so, also where nothing of it could be published."""
    for number, block in enumerate(unpack_blocks(order.dst)):
        store.ledger.set_seal(block, order.seals[number * SEAL_BYTES : (number + 1) * SEAL_BYTES])


def _let_go(store: BlockStore, lease: Lease) -> None:
    del store.copying[lease.number]
    store.unpin(lease, lease.node)
    store.ledger.give_back(lease.account, lease.own_handles(), drained=False)
    store.quotas.refresh(lease.account)
