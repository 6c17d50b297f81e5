"""Pins of an operator: a prefix that is never evicted, such as a system prompt that everybody of a domain starts with.

A pin is declared by name and stands until it is taken back. On every worker it holds as much of the prefix as is
cached there; what is missing is pinned when somebody publishes it, and again after an invalidation. It protects like
the pin of a lease.

What is pinned cannot be taken back for others. So all pins of a worker together may hold what their own domains are
guaranteed there and what is guaranteed to nobody, and no more (I13).
"""

from __future__ import annotations

from coppice.ids import TOKEN_BYTES, DomainId, WorkerId
from coppice_cache.core.base.errors import MessageRefused, OpRefused
from coppice_cache.core.base.results import PinView
from coppice_cache.core.base.settings import is_text
from coppice_cache.core.pool.quotas import Account
from coppice_cache.core.pool.store import HeldPin
from coppice_cache.core.radix.tree import Tree, is_cut_off, walk
from coppice_cache.core.state.state import PinSpec, State
from coppice_cache.core.state.workers import Worker

NAME_BYTES_MAX = 128


def pin(state: State, spec: PinSpec) -> int:
    """Tokens that are pinned now, on the worker that has most. Raises MessageRefused; the same again is no mistake."""
    _check(state, spec)
    if spec.name not in state.pins.by_name:
        state.pins.add(spec)
        for worker in state.workers.values():
            _extend(state, worker, spec)
    held = [(worker.pins.get(spec.name), worker.block_size) for worker in state.workers.values()]
    return max((known.num_blocks * size for known, size in held if known is not None), default=0)


def unpin(state: State, name: str) -> bool:
    """False: there is no pin of that name."""
    if name not in state.pins.by_name:
        return False
    state.pins.remove(name)
    for worker in state.workers.values():
        _let_go(worker, name)
    return True


def view_pins(state: State) -> tuple[PinView, ...]:
    """One view per pin and worker that holds some of it; a pin that is held nowhere has one without a worker."""
    views: list[PinView] = []
    for spec in state.pins.by_name.values():
        held = [(worker, worker.pins[spec.name]) for worker in state.workers.values() if spec.name in worker.pins]
        for worker, known in held:
            count = known.num_blocks * worker.block_size
            views.append(PinView(spec.name, spec.domain, spec.namespace, worker.worker_id, count))
        if not held:
            views.append(PinView(spec.name, spec.domain, spec.namespace, WorkerId(""), 0))
    return tuple(views)


def extend_pins(state: State, worker: Worker, tree: Tree) -> None:
    """Something was published in this tree."""
    for spec in state.pins.of_tree(tree.domain, tree.namespace):
        _extend(state, worker, spec)


def drop_dead_pins(worker: Worker) -> None:
    """Let go of what was invalidated; it would keep its memory for ever."""
    for name, held in tuple(worker.pins.items()):
        if not worker.is_current(held.tree) or is_cut_off(held.node):
            _let_go(worker, name)


def _extend(state: State, worker: Worker, spec: PinSpec) -> None:
    tree = worker.find_tree(spec.domain, spec.namespace)
    if tree is None:
        return
    held = worker.pins.get(spec.name)
    if held is not None and (held.tree is not tree or is_cut_off(held.node)):
        _let_go(worker, spec.name)
        held = None
    have = held.num_blocks if held is not None else 0
    if have == len(spec.tokens) // worker.block_bytes:
        return
    position = walk(tree, spec.tokens, worker.block_bytes)
    if position.num_blocks <= have:
        return
    account = worker.quotas.accounts[spec.domain]
    wanted = min(position.num_blocks, have + _allowance(worker, account))
    if wanted <= have:
        return
    if wanted < position.num_blocks:
        position = walk(tree, spec.tokens, worker.block_bytes, wanted * worker.block_bytes)
    node = worker.split(account, position)
    number = state.next_lease_number()
    account.protected += node.pin(number)
    if held is not None:
        _unpin_node(worker, account, held)
    worker.pins[spec.name] = HeldPin(number, tree, node, wanted)
    worker.quotas.refresh(account)


def _allowance(worker: Worker, account: Account) -> int:
    """How many more blocks pins of this domain may hold."""
    pinned: dict[DomainId, int] = {}
    for held in worker.pins.values():
        pinned[held.tree.domain] = pinned.get(held.tree.domain, 0) + held.num_blocks
    accounts = worker.quotas.accounts
    nobodys = worker.num_blocks - sum(other.guarantee for other in accounts.values())
    borrowed = sum(max(0, count - accounts[domain].guarantee) for domain, count in pinned.items())
    own = pinned.get(account.config.domain, 0)
    room = max(0, account.guarantee - own) + max(0, nobodys - borrowed)
    return max(0, min(room, account.maximum - own))


def _let_go(worker: Worker, name: str) -> None:
    held = worker.pins.pop(name, None)
    if held is not None:
        account = worker.quotas.accounts[held.tree.domain]
        _unpin_node(worker, account, held)
        worker.quotas.refresh(account)


def _unpin_node(worker: Worker, account: Account, held: HeldPin) -> None:
    account.protected -= held.node.unpin(held.number)
    worker.offer(account, held.node)


def _check(state: State, spec: PinSpec) -> None:
    if not is_text(spec.name) or not 0 < len(spec.name.encode()) <= NAME_BYTES_MAX:
        raise MessageRefused(f"the name of a pin has 1 to {NAME_BYTES_MAX} bytes")
    if len(spec.tokens) % TOKEN_BYTES or not 0 < len(spec.tokens) // TOKEN_BYTES <= state.settings.tokens_max:
        raise MessageRefused(f"tokens have {len(spec.tokens)} bytes; they must be packed u32, at least one")
    known = state.pins.by_name.get(spec.name)
    if known is not None and known != spec:
        raise MessageRefused(f"a pin {spec.name!r} is there already and names other tokens; unpin it first")
    if known is None and len(state.pins.by_name) >= state.settings.pins_max:
        raise MessageRefused(f"{len(state.pins.by_name)} pins are declared, the maximum")
    try:
        state.domains.config(spec.domain)
    except OpRefused as refused:
        raise MessageRefused(str(refused)) from refused
