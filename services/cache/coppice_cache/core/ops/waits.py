"""Whether an acquire should wait: for a live lease that computes its prefix, or for a copy from a lower tier."""

from __future__ import annotations

from typing import NamedTuple

from coppice.ids import TOKEN_BYTES
from coppice.messages.index import Acquire, Pending
from coppice_cache.core.ops.offload import blocks_ahead, match_below, promote
from coppice_cache.core.pool.quotas import Account
from coppice_cache.core.radix.tree import MatchPosition, Tree, walk
from coppice_cache.core.state.sessions import Session
from coppice_cache.core.state.single_flight import Coming
from coppice_cache.core.state.state import NS_PER_MS, State
from coppice_cache.core.state.workers import LowerTier, Worker


class Below(NamedTuple):
    """What a lower tier has of a prompt, and the prefill that it saves, less what could be computed meanwhile."""

    tier: LowerTier
    num_blocks: int  # from the root
    saved_tokens: int


class Placement(NamedTuple):
    """What one candidate could give: its tree (perhaps not hung up yet), where the match ends, what is left to do."""

    worker: Worker
    account: Account
    tree: Tree
    position: MatchPosition
    cost: int  # tokens to compute, and those that stand before
    coming: Coming | None = None  # what a live lease is about to add to the match
    below: tuple[Below, ...] = ()  # what could be copied, the best first


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
    return _weigh_below(state, op, placement)


def _weigh_below(state: State, op: Acquire, placement: Placement) -> Placement:
    """What lower tiers could add, or are about to: a copy into a tier is waited for like one to the device.

    From a tier that is not next to the device a prompt comes in hops, one for each time that it asks. All of them
    count.
    """
    worker, own, size = placement.worker, placement.position.num_blocks, placement.worker.block_size
    stop = matchable_bytes(op.tokens, worker.block_bytes)
    hops: list[tuple[LowerTier, int]] = []  # each with what the store above it has
    options: list[Below] = []
    above = reached = own
    found: MatchPosition | None = None  # in the lower tier above
    now_ns = state.call_time.now_ns
    for tier in worker.lower_tiers:
        if not tier.gives(now_ns):
            break  # nor does any below it
        coming = None if found is None else _find_coming(state, op, worker, found)
        if coming is not None and coming.num_blocks > own:
            return placement._replace(coming=coming, cost=placement.cost - (coming.num_blocks - own) * size)
        hops.append((tier, above))
        found = match_below(tier, op.domain, op.namespace, op.tokens, stop)
        above = 0 if found is None else found.num_blocks
        # As few tokens as nobody waits for would be ordered again by the next who asks: it would not find the flight.
        if (above - reached) * size < max(1, state.settings.flight_tokens_min):
            continue
        reached = above
        takes_us = sum(
            hop.costs_of(hop.up, now_ns).takes_us(above - has, blocks_ahead(hop, op.domain)) for hop, has in hops
        )
        num_tokens, prefill_us = (above - own) * size, tier.costs.prefill_us_per_token
        if takes_us < num_tokens * prefill_us:
            options.append(Below(tier, above, num_tokens - int(takes_us / prefill_us)))
    if not options:
        return placement
    options.sort(key=lambda option: -option.saved_tokens)
    return placement._replace(below=tuple(options), cost=placement.cost - options[0].saved_tokens)


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
    for below in placement.below:
        coming = coming or _promoted(state, op, placement, below)
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


def _promoted(state: State, op: Acquire, placement: Placement, below: Below) -> Coming | None:
    """The flight of a copy that was just ordered."""
    worker, tier, end = placement.worker, below.tier, below.num_blocks * placement.worker.block_bytes
    if tier.upper is worker:
        tree, position, account = placement.tree, placement.position, placement.account
    elif (found := _place_in(state, tier, placement.account, op)) is not None:
        tree, position, account = found
    else:
        return None
    count, has_more = below.num_blocks - position.num_blocks, placement.position.num_blocks - position.num_blocks
    # What the device has already, and as few tokens as nobody waits for, are not worth the first hop alone.
    least = max(0, has_more) + -(-state.settings.flight_tokens_min // worker.block_size)
    if not promote(state, worker, tier, tree, position, account, op.tokens, count, min(count, least)):
        return None
    return worker.flights.coming(walk(tree, op.tokens, worker.block_bytes, end), op.tokens, end)


def _place_in(
    state: State, tier: LowerTier, account: Account, op: Acquire
) -> tuple[Tree, MatchPosition, Account] | None:
    """Where a copy from this tier goes on in the lower tier above it; None where there is no place for the domain."""
    store = tier.upper
    if not store.quotas.makes_place(op.domain, state.settings.domains_per_worker_max):
        return None
    tree = store.find_tree(op.domain, op.namespace)
    if tree is None:
        key = tier.store.trees[op.domain, op.namespace].chain_key
        tree = store.new_tree(op.domain, op.namespace, key)
    stop = matchable_bytes(op.tokens, store.block_bytes)
    return tree, walk(tree, op.tokens, store.block_bytes, stop), store.quotas.use_of(account.config.by_shares())
