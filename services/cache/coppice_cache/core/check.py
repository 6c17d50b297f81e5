"""Recompute what can be recomputed and compare: conservation, pins, prefix closure, accounts.

Called after every step in tests and when idle in production. Each function raises InvariantBroken with the invariant's
name and the evidence.
"""

from __future__ import annotations

from collections import Counter

from coppice.handles import BLOCKS_MAX, HANDLE_BYTES, block_of
from coppice.ids import LeaseId
from coppice.messages.index import lease_hash
from coppice.seals import SEAL_BYTES
from coppice_cache.core.errors import InvariantBroken
from coppice_cache.core.leases import Lease
from coppice_cache.core.ledger import BlockState, unpack_handles
from coppice_cache.core.quotas import DomainUse
from coppice_cache.core.radix import Node, Tree
from coppice_cache.core.sessions import Session
from coppice_cache.core.settings import Mode
from coppice_cache.core.state import State
from coppice_cache.core.workers import Worker


def check_state(state: State) -> None:
    for session in state.sessions.values():
        _check_session(state, session)
    for worker in state.workers.values():
        expected = _explain_leases(state, worker)
        nodes = _check_trees(worker, expected)
        nodes |= _check_orphans(worker, expected)
        _check_count(worker, nodes)
        _check_ledger(worker, expected)
        _check_pins(worker, nodes)
        _check_accounts(worker, nodes)


def _require(holds: bool, name: str, evidence: str) -> None:
    if not holds:
        raise InvariantBroken(name, evidence)


def _check_session(state: State, session: Session) -> None:
    digest = 0
    for lease_id in [*session.leases, *session.claims]:
        digest ^= lease_hash(LeaseId(lease_id))
    _require(digest == session.digest, "I2", f"digest of session {session.epoch}")
    for lease_id, lease in session.leases.items():
        worker = session.workers[lease_id]
        known = worker.leases.get(lease.number) is lease and state.workers.get(worker.worker_id) is worker
        _require(known and not lease.draining, "I2", f"session {session.epoch} lists lease {lease_id.hex()}")


def _explain_leases(state: State, worker: Worker) -> dict[int, BlockState]:
    """State that each leased or draining block must have, from the leases alone."""
    expected: dict[int, BlockState] = {}
    fenced = {lease.number for pending in worker.fences.values() for lease in pending.leases}
    fenced |= {lease.number for lease in [*worker.to_fence, *worker.window.displaced]}
    for number, lease in worker.leases.items():
        session = state.sessions.get(lease.epoch)
        listed = session is not None and session.leases.get(lease.lease_id) is lease
        _require(listed != lease.draining, "I2", f"lease {lease.lease_id.hex()} is neither live nor draining")
        _require(lease.draining == (number in fenced), "I9", f"lease {lease.lease_id.hex()} drains without a fence")
        for block in lease.own_blocks():
            _require(block not in expected, "I7", f"block {block} of {worker.worker_id} has two owners")
            expected[block] = BlockState.DRAINING if lease.draining else BlockState.LEASED
            _require(worker.ledger.last_use[block] is lease.use, "I3", f"block {block} is another domain's")
            _require(not any(worker.ledger.seal(block)), "I7", f"writable block {block} is sealed")
        _check_table(worker, lease)
        _require(lease.tree is None or lease.tree.domain == lease.use.config.domain, "I3", f"tree of lease {number}")
    for block, holders in worker.holders.items():
        _require(block not in expected and bool(holders), "I7", f"held block {block} has an owner too")
        alive = any(not lease.draining for lease in holders.values())
        expected[block] = BlockState.LEASED if alive else BlockState.DRAINING
        _require(all(worker.leases.get(n) is h for n, h in holders.items()), "I2", f"holders of block {block}")
    return expected


def _check_table(worker: Worker, lease: Lease) -> None:
    """I5: a live lease's handles are current, or its blocks were published and its pin keeps them."""
    if lease.draining:
        return
    for handle in unpack_handles(lease.table):
        block = block_of(handle)
        _require(worker.ledger.handle(block) == handle, "I5", f"lease {lease.lease_id.hex()}: stale block {block}")


def _check_trees(worker: Worker, expected: dict[int, BlockState]) -> dict[int, Node]:
    """I11: every node hangs below its parent under its first block. Adds the CACHED blocks to what is expected."""
    nodes: dict[int, Node] = {}
    for (domain, namespace), tree in worker.trees.items():
        _require((tree.domain, tree.namespace) == (domain, namespace), "I3", f"tree of {domain!r}")
        _require(tree.parent is None and not tree.handles, "I11", f"root of {domain!r}")
        waiting: list[Node] = [tree]
        while waiting:
            node = waiting.pop()
            nodes[id(node)] = node
            for key, child in node.children.items():
                _require(child.parent is node, "I11", f"a child in {domain!r} has another parent")
                _require(child.tokens[: worker.block_bytes] == key, "I11", f"a child in {domain!r} has another key")
                _check_edge(worker, tree, child, expected)
                waiting.append(child)
    return nodes


def _check_orphans(worker: Worker, expected: dict[int, BlockState]) -> dict[int, Node]:
    """What left a tree but is still read: every such node guards a lease, and no parent in a tree lists it."""
    orphans: dict[int, Node] = {}
    for lease in worker.leases.values():
        node = lease.node
        while lease.tree is not None and node.is_orphan and id(node) not in orphans:
            orphans[id(node)] = node
            _require(node.parent is not None and node.guards > 0, "I11", f"an orphan guards nothing: {lease.number}")
            assert node.parent is not None
            found = _is_listed(node, worker.block_bytes) and not node.parent.is_orphan
            _require(not found, "I11", f"an orphan can be found in {lease.tree.domain!r}")
            _check_edge(worker, lease.tree, node, expected)
            node = node.parent
    return orphans


def _is_listed(node: Node, block_bytes: int) -> bool:
    return node.parent is not None and node.parent.children.get(node.tokens[:block_bytes]) is node


def _check_count(worker: Worker, nodes: dict[int, Node]) -> None:
    _require(worker.num_nodes == len(nodes) - len(worker.trees), "I11", f"{worker.num_nodes} nodes are counted")


def _check_edge(worker: Worker, tree: Tree, node: Node, expected: dict[int, BlockState]) -> None:
    count = len(node.handles) // HANDLE_BYTES
    sizes = (len(node.tokens), len(node.seals)) == (count * worker.block_bytes, count * SEAL_BYTES)
    _require(sizes and count > 0, "I11", f"edge of {count} blocks in {tree.domain!r}")
    for index, handle in enumerate(unpack_handles(node.handles)):
        block = handle & (BLOCKS_MAX - 1)
        _require(block not in expected, "I8", f"block {block} is in a tree and elsewhere")
        expected[block] = BlockState.CACHED
        _require(worker.ledger.handle(block) == handle, "I5", f"the tree of {tree.domain!r} has a stale block {block}")
        seal = node.seals[index * SEAL_BYTES : (index + 1) * SEAL_BYTES]
        _require(worker.ledger.seal(block) == seal, "I8", f"seal of block {block}")
        owner = worker.ledger.last_use[block].config.domain
        _require(owner == tree.domain, "I3", f"block {block} of {owner!r} is in the tree of {tree.domain!r}")


def _check_ledger(worker: Worker, expected: dict[int, BlockState]) -> None:
    """I1: the states are exactly what leases and trees say; the rest is free, or drains until the opening."""
    ledger = worker.ledger
    unexplained = BlockState.FREE if worker.is_open else BlockState.DRAINING
    for block in range(worker.num_blocks):
        should_be = expected.get(block, unexplained)
        _require(ledger.state[block] == should_be, "I1", f"block {block}: {ledger.state[block]}, not {should_be!r}")
    counts = Counter(ledger.state)
    _require([counts[s] for s in BlockState] == ledger.counts, "I1", f"counted {ledger.counts}, found {counts}")
    _require(sum(ledger.counts) == worker.num_blocks, "I1", f"{sum(ledger.counts)} of {worker.num_blocks} blocks")
    listed = Counter(ledger.free)
    _require(all(n == 1 for n in listed.values()), "I1", "a block is in the free list twice")
    free = {b for b in range(worker.num_blocks) if ledger.state[b] == BlockState.FREE}
    _require(set(listed) <= free, "I1", "a block in the free list is not free")
    used_up = all(ledger.is_used_up(block) for block in free - set(listed))
    _require(used_up, "I1", f"free blocks are missing in the free list: {sorted(free - set(listed))[:8]}")
    for block, before in enumerate(ledger.checked):
        _require(ledger.generation[block] >= before, "I4", f"generation of block {block} went back")
    ledger.checked = ledger.generation[:]


def _check_pins(worker: Worker, nodes: dict[int, Node]) -> None:
    """I2: pins are the leases whose deepest node it is; guards follow from pins."""
    pins: dict[int, set[int]] = {}
    for number, lease in worker.leases.items():
        if lease.tree is None:
            continue
        _require(id(lease.node) in nodes, "I2", f"lease {number} is pinned to a node outside of every tree")
        pins.setdefault(id(lease.node), set()).add(number)
    num_hidden = Counter(
        id(node.parent) for node in nodes.values() if node.is_orphan and not _is_listed(node, worker.block_bytes)
    )
    for key, node in nodes.items():
        _require(set(node.pins) == pins.get(key, set()), "I2", f"pins {set(node.pins)} against {pins.get(key)}")
        guards = bool(node.pins) + sum(1 for child in node.children.values() if child.guards) + num_hidden[key]
        _require(guards == node.guards, "I2", f"{node.guards} guards where {guards} were found")
    for lease in worker.leases.values():
        if lease.tree is not None:
            depth, at = 0, lease.node
            while at.parent is not None:
                depth, at = depth + at.num_blocks, at.parent
            _require(at is lease.tree, "I2", f"lease {lease.number} is pinned in another tree")
            _require(depth == lease.num_settled, "I2", f"lease {lease.number}: pin at {depth}, not {lease.num_settled}")


def _check_accounts(worker: Worker, nodes: dict[int, Node]) -> None:
    """I13, I14 and the sums that decisions rest on."""
    protected: Counter[str] = Counter()
    for node in nodes.values():
        if node.is_orphan:
            protected[_domain_of(node)] += node.num_blocks
    evictable: dict[str, set[int]] = {}
    by_state: Counter[tuple[int, int]] = Counter()
    for block, use in enumerate(worker.ledger.last_use):
        by_state[id(use), worker.ledger.state[block]] += 1
    for tree in worker.trees.values():
        waiting: list[Node] = list(tree.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            if node.guards:
                protected[tree.domain] += node.num_blocks
            elif not node.children:
                evictable.setdefault(tree.domain, set()).add(id(node))
    uses = worker.quotas.uses
    for domain, use in uses.items():
        found = tuple(by_state[id(use), s] for s in (BlockState.LEASED, BlockState.CACHED, BlockState.DRAINING))
        _require(found == (use.leased, use.cached, use.draining), "I1", f"account of {domain!r}: {found}")
        _require(protected[domain] == use.protected, "I2", f"{use.protected} protected blocks of {domain!r}")
        queued = use.queue.entries()
        _require(evictable.get(domain, set()) <= queued, "I11", f"a leaf of {domain!r} cannot be evicted")
        _check_limits(domain, use)
    _require(sum(use.lendable for use in uses.values()) == worker.quotas.lendable, "I14", "sum of lendable blocks")
    _require(sum(use.reserve for use in uses.values()) == worker.quotas.reserve, "I14", "sum of strict reserves")
    _require(sum(use.guarantee for use in uses.values()) <= worker.num_blocks, "I13", "sum of guarantees")


def _domain_of(node: Node) -> str:
    root = node
    while root.parent is not None:
        root = root.parent
    assert isinstance(root, Tree)
    return root.domain


def _check_limits(domain: str, use: DomainUse) -> None:
    most = max(use.maximum, use.reattached_peak)
    _require(use.held <= most, "I13", f"{domain!r} holds {use.held} blocks; its maximum is {use.maximum}")
    _require(use.lendable == min(use.evictable, use.over), "I14", f"lendable blocks of {domain!r}")
    strict = use.config.mode is Mode.STRICT
    _require(use.reserve == (max(0, use.guarantee - use.held) if strict else 0), "I14", f"reserve of {domain!r}")
