"""Whether an acquire should wait: for a live lease that computes its prefix, or for a copy from the host tier."""

from __future__ import annotations

from typing import NamedTuple

from coppice.ids import TOKEN_BYTES
from coppice.messages.index import Acquire, Pending
from coppice_cache.core.ops.offload import blocks_ahead, host_match, promote
from coppice_cache.core.pool.quotas import Account
from coppice_cache.core.radix.tree import MatchPosition, Tree, walk
from coppice_cache.core.state.sessions import Session
from coppice_cache.core.state.single_flight import Coming
from coppice_cache.core.state.state import NS_PER_MS, State
from coppice_cache.core.state.workers import Worker


class Placement(NamedTuple):
    """What one candidate could give: its tree (perhaps not hung up yet), where the match ends, what is left to do."""

    worker: Worker
    account: Account
    tree: Tree
    position: MatchPosition
    cost: int  # tokens to compute, and those that stand before
    coming: Coming | None = None  # what a live lease is about to add to the match
    num_host_blocks: int = 0  # that the host tier could add


def matchable_bytes(tokens: bytes, block_bytes: int) -> int:
    """Whole blocks that a match may cover: never the last token, since something must be computed for a sample."""
    return max(0, len(tokens) - TOKEN_BYTES) // block_bytes * block_bytes


def weigh_waiting(state: State, op: Acquire, placement: Placement) -> Placement:
    """The placement with what a wait would bring, and the cost after it. Nothing for a request that would never fit."""
    worker, size = placement.worker, placement.worker.block_size
    if worker.blocks_for(op.reserve_tokens) > worker.quotas.ceiling(placement.account):
        return placement
    coming = _find_coming(state, op, worker, placement.position)
    if coming is not None:
        gain = (coming.num_blocks - placement.position.num_blocks) * size
        return placement._replace(coming=coming, cost=placement.cost - gain)
    stop = matchable_bytes(op.tokens, worker.block_bytes)
    found = host_match(worker, op.domain, op.namespace, op.tokens, stop)
    if worker.host is None or found is None:
        return placement
    count = found.num_blocks - placement.position.num_blocks
    # As few tokens as nobody waits for would be ordered again by the next who asks, as it would not find the flight.
    if count * size < max(1, state.settings.flight_tokens_min):
        return placement
    costs, num_ahead = worker.host.costs, blocks_ahead(worker.host, op.domain)
    if not costs.is_worth_promoting(count, size, num_ahead):
        return placement
    return placement._replace(num_host_blocks=count, cost=placement.cost - costs.tokens_saved(count, size, num_ahead))


def still_waiting(state: State, session: Session, op: Acquire) -> Pending | None:
    """The answer of before to who asks again while it waits: the op is idempotent, whatever else became findable.

    None for who does not wait, or wants to no longer, or somewhere else, or has lost its leader: that asks anew.
    """
    worker = session.waiting.get(op.lease_id)
    if worker is None or not op.may_wait or op.skip_match:
        return None
    if all(candidate.worker_id != worker.worker_id for candidate in op.candidates):
        return None
    waiter = worker.flights.still_waits(session.epoch, op.lease_id, (op.domain, op.namespace), op.tokens)
    return None if waiter is None else Pending(op.lease_id, waiter.num_tokens, state.settings.flight_wait_ms)


def wait_for(state: State, session: Session, op: Acquire, placement: Placement, now_ns: int) -> Pending | None:
    """Wait for what the cheapest placement counts on; None when there is nothing to wait for."""
    coming = placement.coming
    if coming is None and placement.num_host_blocks:
        coming = _promoted(state, op, placement)
    if coming is None:
        return None
    worker, wait_ms = placement.worker, state.settings.flight_wait_ms
    wake_ns = now_ns + wait_ms * NS_PER_MS
    before = session.waiting.get(op.lease_id)
    if before is not None and before is not worker:
        wake_ns = min(wake_ns, before.flights.bound_ns(session.epoch, op.lease_id) or wake_ns)
        session.stop_waiting(op.lease_id)
    session.waiting[op.lease_id] = worker
    num_tokens = (coming.num_blocks - placement.position.num_blocks) * worker.block_size
    worker.flights.wait(session.epoch, op.lease_id, coming, num_tokens, wake_ns)
    return Pending(op.lease_id, num_tokens, wait_ms)


def _find_coming(state: State, op: Acquire, worker: Worker, position: MatchPosition) -> Coming | None:
    """A flight that is worth waiting for."""
    coming = worker.flights.coming(position, op.tokens, matchable_bytes(op.tokens, worker.block_bytes))
    if (
        coming is None
        or (coming.num_blocks - position.num_blocks) * worker.block_size < state.settings.flight_tokens_min
    ):
        return None
    return coming


def _promoted(state: State, op: Acquire, placement: Placement) -> Coming | None:
    """The flight of a copy that was just ordered."""
    worker = placement.worker
    stop = matchable_bytes(op.tokens, worker.block_bytes)
    if not promote(
        state, worker, placement.tree, placement.position, placement.account, op.tokens, placement.num_host_blocks
    ):
        return None
    return worker.flights.coming(walk(placement.tree, op.tokens, worker.block_bytes, stop), op.tokens, stop)
