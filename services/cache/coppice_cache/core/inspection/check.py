"""What must hold of each session, lease, node, block and account. `audit` asks all of it, in slices or at once.

Everything here looks at one thing, or at few, and raises InvariantBroken with the invariant's name and the evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from coppice.handles import BLOCK_BITS, BLOCKS_MAX, HANDLE_BYTES
from coppice.seals import NO_SEAL
from coppice_cache.core.base.errors import InvariantBroken
from coppice_cache.core.base.settings import Mode
from coppice_cache.core.pool.block_time import BlockTime
from coppice_cache.core.pool.free_ring import Blocks, blocks_array, unpack_handles
from coppice_cache.core.pool.generations import Bool
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.ledger import BlockState, Ledger, are_current
from coppice_cache.core.pool.quotas import Account, Quotas
from coppice_cache.core.pool.store import BlockStore
from coppice_cache.core.radix.tree import Node, Tree, is_cut_off, root_of, top_of
from coppice_cache.core.state.state import State
from coppice_cache.core.state.workers import Worker

FEW_BLOCKS = 8


def require(holds: bool, name: str, evidence: str) -> None:
    if not holds:
        raise InvariantBroken(name, evidence)


def require_all(holds: Bool, name: str, evidence: str, blocks: Blocks) -> None:
    """`holds` has one entry per block of `blocks`; those where it is false are named."""
    if not holds.all():
        raise InvariantBroken(name, f"{evidence}: blocks {blocks[~holds][:8].tolist()}")


def _are_sealed(ledger: Ledger, blocks: Blocks) -> Bool:
    sealed: Bool = (ledger.seal_words[blocks] != 0).any(axis=1)
    return sealed


def upwards(node: Node) -> Iterator[Node]:
    at: Node | None = node
    while at is not None:
        yield at
        at = at.parent


def is_listed(node: Node, block_bytes: int) -> bool:
    return node.parent is not None and node.parent.children.get(node.tokens[:block_bytes]) is node


# ---- leases


def fenced_numbers(worker: Worker) -> set[int]:
    """Leases that end with a fence which was sent, or will be."""
    fenced = {lease.number for pending in worker.fences.values() for lease in pending.leases}
    return fenced | {lease.number for lease in [*worker.to_fence, *worker.window.displaced]}


def check_lease(state: State, worker: Worker, lease: Lease, fenced: set[int]) -> Blocks:
    """Of a session. Returns the blocks that only this lease uses."""
    session, name = state.sessions.get(lease.epoch), lease.lease_id.hex()
    listed = session is not None and session.leases.get(lease.lease_id) is lease
    require(listed != lease.draining, "I2", f"lease {name} is neither live nor draining")
    require(lease.draining == (lease.number in fenced), "I9", f"lease {name} drains without a fence")
    return check_blocks(worker, lease)


def check_blocks(store: BlockStore, lease: Lease) -> Blocks:
    """Of any lease, those of copies between tiers too."""
    number, ledger = lease.number, store.ledger
    blocks = blocks_array(lease.own_handles())
    should_be = BlockState.DRAINING if lease.draining else BlockState.LEASED
    require(len(set(blocks.tolist())) == len(blocks), "I7", f"lease {number} owns a block twice")
    require_all(ledger.states[blocks] == should_be, "I1", f"lease {number} has them, not as {should_be.name}", blocks)
    require_all(ledger.are_owned_by(lease.account, blocks), "I3", "they are another domain's", blocks)
    if not lease.num_claimed:  # the worker may have sealed what came back unpublished
        require_all(~_are_sealed(ledger, blocks), "I7", "writable and sealed", blocks)
    require(lease.tree is None or lease.tree.domain == lease.account.config.domain, "I3", f"tree of lease {number}")
    if not lease.draining:
        # A live lease's handles are current, or its blocks were published and its pin keeps them.
        current = are_current(ledger, lease.table)
        require_all(current, "I5", f"lease {number} is stale", blocks_array(lease.table))
    return blocks


def check_holders(worker: Worker, block: int, holders: dict[int, Lease]) -> None:
    """A block that re-attached leases share."""
    alive = any(not lease.draining for lease in holders.values())
    should_be = BlockState.LEASED if alive else BlockState.DRAINING
    require(bool(holders), "I2", f"block {block} is held by nobody")
    require(worker.ledger.state[block] == should_be, "I1", f"held block {block} is not {should_be.name}")
    require(all(worker.leases.get(n) is h for n, h in holders.items()), "I2", f"holders of block {block}")


# ---- nodes


def check_node(store: BlockStore, domain: str, node: Node) -> None:
    """Its edge, block by block."""
    count = len(node.handles) // HANDLE_BYTES
    fits = len(node.tokens) == count * store.block_bytes and len(node.handles) == count * HANDLE_BYTES
    require(fits and count > 0, "I11", f"edge of {count} blocks in {domain!r}")
    if count <= FEW_BLOCKS:
        for handle in unpack_handles(node.handles):
            _check_cached(store.ledger, domain, handle)
        return
    ledger = store.ledger
    blocks = blocks_array(node.handles)
    require_all(ledger.states[blocks] == BlockState.CACHED, "I1", f"in the tree of {domain!r}, not cached", blocks)
    require_all(are_current(ledger, node.handles), "I5", f"stale in the tree of {domain!r}", blocks)
    require_all(_are_sealed(ledger, blocks), "I8", "findable and not sealed", blocks)
    owners = {account.config.domain for account in ledger.owners.uses_of(blocks)}
    require(owners == {domain}, "I3", f"blocks of {sorted(owners)} are in the tree of {domain!r}")


def _check_cached(ledger: Ledger, domain: str, handle: int) -> None:
    """The same of one block: numpy would take longer for a few."""
    block = handle & (BLOCKS_MAX - 1)
    if ledger.state[block] != BlockState.CACHED:
        raise InvariantBroken("I1", f"block {block} is in the tree of {domain!r} and not cached")
    if ledger.generation[block] != handle >> BLOCK_BITS:
        raise InvariantBroken("I5", f"block {block} is stale in the tree of {domain!r}")
    if ledger.seal(block) == NO_SEAL:
        raise InvariantBroken("I8", f"block {block} is findable and not sealed")
    owner = ledger.owners.use_of(block).config.domain
    if owner != domain:
        raise InvariantBroken("I3", f"block {block} of {owner!r} is in the tree of {domain!r}")


def check_listed(store: BlockStore, domain: str, parent: Node, key: bytes, child: Node) -> None:
    """I11: a child hangs below its parent under its first block."""
    require(child.parent is parent, "I11", f"a child in {domain!r} has another parent")
    require(child.tokens[: store.block_bytes] == key, "I11", f"a child in {domain!r} has another key")


def check_root(store: BlockStore, key: tuple[str, bytes], tree: Tree) -> None:
    require((tree.domain, tree.namespace) == key, "I3", f"tree of {key[0]!r}")
    require(tree.parent is None and not tree.handles, "I11", f"root of {key[0]!r}")


def check_hidden(store: BlockStore, node: Node) -> None:
    """Nobody finds it: it was cut off, or its tree is not the one that is looked up."""
    top = top_of(node)
    known = store.trees.get((top.domain, top.namespace)) if isinstance(top, Tree) else None
    require(is_cut_off(node) or top is not known, "I11", "a node is lost")


def check_pins(store: BlockStore, accounts: set[Account], others: Iterable[Node]) -> None:
    """I2, for all leases and operators' pins of these domains: pins, guards and protected blocks follow from them.

    `others` are nodes of these domains; those among them that have pins or guards must be explained too.
    """
    pins = _pins_of(store, accounts)
    guards: dict[Node, int] = {}
    for pinned in pins:
        for node in upwards(pinned):
            guards[node] = guards.get(node, 0) + 1
            if guards[node] > 1:
                break
    suspects = [node for node in others if (node.guards or node.pins) and node not in guards]
    for node in [*guards, *suspects]:
        _check_guards(store, node, pins.get(node, set()), guards.get(node, 0))
    _check_protected(accounts, guards)


def _pins_of(store: BlockStore, accounts: set[Account]) -> dict[Node, set[int]]:
    domains = {account.config.domain for account in accounts}
    pins: dict[Node, set[int]] = {}
    for lease in store.all_leases():
        if lease.account not in accounts or lease.tree is None:
            continue
        number, depth = lease.number, sum(node.num_blocks for node in upwards(lease.node))
        require(depth == lease.num_settled, "I2", f"lease {number}: pin at {depth}, not {lease.num_settled}")
        for node in (lease.node,) if lease.copy_node is None else (lease.node, lease.copy_node):
            require(top_of(node) is lease.tree, "I2", f"lease {number} is pinned in another tree")
            pins.setdefault(node, set()).add(number)
    for held in store.all_pins():
        if held.tree.domain in domains:
            require(top_of(held.node) is held.tree, "I2", "an operator's pin is in another tree")
            pins.setdefault(held.node, set()).add(held.number)
    return pins


def _check_guards(store: BlockStore, node: Node, pins: set[int], guards: int) -> None:
    require(set(node.pins) == pins, "I2", f"pins {set(node.pins)} against {pins}")
    require(guards == node.guards, "I2", f"{node.guards} guards where {guards} were found")
    if node.parent is not None:
        hangs = is_listed(node, store.block_bytes) or is_cut_off(node)
        require(hangs, "I2", "a pin is outside of every tree")


def _check_protected(accounts: set[Account], guards: dict[Node, int]) -> None:
    protected = {account.config.domain: 0 for account in accounts}
    for node in guards:
        domain = root_of(node).domain
        require(domain in protected, "I3", f"a lease is pinned in the tree of {domain!r}")
        protected[domain] += node.num_blocks
    for account in accounts:
        domain, found = account.config.domain, protected[account.config.domain]
        require(found == account.protected, "I2", f"{account.protected} protected blocks of {domain!r}, found {found}")


# ---- ledger and accounts


def check_counts(ledger: Ledger) -> None:
    """I1: the sums over the ledger."""
    counts = [int(np.count_nonzero(ledger.states == state)) for state in BlockState]
    require(counts == ledger.counts, "I1", f"counted {ledger.counts}, found {counts}")
    require(sum(counts) == ledger.num_blocks, "I1", f"{sum(counts)} of {ledger.num_blocks} blocks")


def check_free_list(ledger: Ledger) -> None:
    """I1: every block that is free and has a generation left is listed, once."""
    listed = ledger.free.blocks()
    is_listed = np.zeros(ledger.num_blocks, np.bool_)
    is_listed[listed] = True
    is_free = ledger.states == BlockState.FREE
    require(int(np.count_nonzero(is_listed)) == len(listed), "I1", "a block is in the free list twice")
    strange = np.flatnonzero(is_listed & ~is_free)
    require(not len(strange), "I1", f"in the free list and not free: blocks {strange[:8].tolist()}")
    missing = np.flatnonzero(is_free & ~is_listed).tolist()
    require(all(ledger.is_used_up(b) for b in missing), "I1", f"not in the free list and free: {missing[:8]}")


def check_generations(ledger: Ledger, blocks: slice) -> None:
    """I4, between one check and the next. The copy is made by the first one: who never checks does not pay for it."""
    if ledger.checked is None:
        ledger.checked = np.zeros(ledger.num_blocks, np.uint64)
    now = ledger.generations[blocks]
    first = blocks.start or 0
    everything = np.arange(first, first + len(now))
    require_all(now >= ledger.checked[blocks], "I4", "the generation went back", everything)
    ledger.checked[blocks] = now


def check_account(ledger: Ledger, account: Account) -> None:
    """I1, I13, I14 of one domain."""
    domain = account.config.domain
    found = [0, 0, 0, 0]
    if ledger.owners.accounts[account.owner_index] is account:
        states = ledger.states[ledger.owners.indices == account.owner_index]
        found = [int(np.count_nonzero(states == state)) for state in BlockState]
    require(
        found[1:] == [account.leased, account.cached, account.draining], "I1", f"account of {domain!r}: {found[1:]}"
    )
    most = max(account.maximum, account.reattached_peak)
    require(account.held <= most, "I13", f"{domain!r} holds {account.held} blocks; its maximum is {account.maximum}")
    require(account.lendable == min(account.evictable, account.over), "I14", f"lendable blocks of {domain!r}")
    strict = account.config.mode is Mode.STRICT
    require(
        account.reserve == (max(0, account.guarantee - account.held) if strict else 0), "I14", f"reserve of {domain!r}"
    )
    _check_domain_time(ledger.block_time, account)


def _check_domain_time(block_time: BlockTime, account: Account) -> None:
    """I1 over time, of one domain."""
    block_time.call_time.settle()
    record, domain = account.time, account.config.domain
    idle = 0 if account.is_strict else max(0, account.guarantee - account.held)
    counted = (record.held, record.cached, record.draining, record.guaranteed, record.borrowed, record.idle)
    found = (account.held, account.cached, account.draining, account.guarantee, account.over, idle)
    what = "held, cached, draining, guaranteed, borrowed, idle"
    require(counted == found, "I1", f"block time of {domain!r}: {counted} {what}; found {found}")
    until = block_time.of(account, block_time.call_time.now_ns)
    parts = (until.leased_block_ns, until.cached_block_ns, until.draining_block_ns, until.borrowed_block_ns)
    within = until.held_block_ns - until.borrowed_block_ns
    is_possible = min(parts) >= 0 and 0 <= until.lent_block_ns <= until.guaranteed_block_ns - within
    require(is_possible, "I1", f"block time of {domain!r}: {until}")


def check_block_time(ledger: Ledger, quotas: Quotas) -> None:
    """I1 over time: what domains held, what nobody has claimed and what was free is the pool, to the nanosecond."""
    block_time, accounts = ledger.block_time, list(quotas.accounts.values())
    block_time.call_time.settle()
    now_ns = block_time.call_time.now_ns
    pool = block_time.pool(ledger.owners.unknown, now_ns)
    held = sum(account.time.held * now_ns - account.time.held_moment for account in accounts)
    held += sum(closed.held_block_ns for closed in block_time.closed.by_domain.values())
    excess = held + pool.free_block_ns + pool.unclaimed_block_ns - pool.pool_block_ns
    require(excess == 0, "I1", f"the block time of domains and free blocks is {excess} ns above that of the pool")
    found = (
        sum(account.over for account in accounts),
        sum(account.time.idle for account in accounts),
        block_time.num_blocks - sum(account.guarantee for account in accounts),
    )
    counted = (block_time.borrowed, block_time.idle, block_time.unguaranteed)
    require(counted == found, "I1", f"block time counts {counted} borrowed, idle, unguaranteed; found {found}")


def check_sums(quotas: Quotas) -> None:
    """I13, I14: what decisions rest on."""
    accounts = quotas.accounts.values()
    require(sum(account.lendable for account in accounts) == quotas.lendable, "I14", "sum of lendable blocks")
    require(sum(account.reserve for account in accounts) == quotas.reserve, "I14", "sum of strict reserves")
    require(sum(account.guarantee for account in accounts) <= quotas.num_blocks, "I13", "sum of guarantees")


def check_flights(state: State, worker: Worker) -> None:
    """Leaders are live leases or promotions; who waits is in the books of its session."""
    for number in worker.flights.leaders():
        copying = [store.copying[number] for store in worker.stores if number in store.copying]
        lease = worker.leases.get(number) or (copying[0] if copying else None)
        require(lease is not None and not lease.draining, "I2", f"lease {number} leads a flight and is over")
    for epoch, lease_id in worker.flights.check():
        session = state.sessions.get(epoch)
        known = session is not None and session.waiting.get(lease_id) is worker
        require(known, "I2", f"session {epoch} does not know that {lease_id.hex()} waits")
