"""Acquire and extend: decide first, then pin, evict and grant."""

from __future__ import annotations

from math import ceil

from coppice.ids import TOKEN_BYTES
from coppice.messages.index import (
    Acquire,
    Answer,
    Extend,
    Extended,
    Gone,
    Grant,
    NoCapacity,
    NoCapacityReason,
)
from coppice_cache.core.base.errors import OpRefused
from coppice_cache.core.base.settings import CoreSettings, DomainConfig, Mode
from coppice_cache.core.eviction.policy import hint_of
from coppice_cache.core.ops.offload import demote_ahead
from coppice_cache.core.ops.partial_copy import blocks_newly_protected, find_copy, with_copy
from coppice_cache.core.ops.reclaim import end_reservation, owe, retry_ms
from coppice_cache.core.ops.waits import Placement, matchable_bytes, still_waiting, wait_for, weigh_waiting
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.pool.ledger import Granted
from coppice_cache.core.pool.quotas import Account, EvictionPlan
from coppice_cache.core.pool.reservations import ReservationKey
from coppice_cache.core.radix.tree import MatchPosition, path, unprotected_blocks, walk
from coppice_cache.core.state.sessions import Session
from coppice_cache.core.state.state import NS_PER_MS, State
from coppice_cache.core.state.workers import Worker

_RETRY_MIN_MS = 5
_RETRY_MAX_MS = 10_000
_NEVER_RETRY_MS = 60_000
_UNLISTED_RETRY_MS = 500
_POOL_FULL = NoCapacityReason.POOL_FULL


def acquire(state: State, session: Session, op: Acquire, now_ns: int) -> Answer:
    """Match on every candidate, take the cheapest that has room; the same lease id gets the same grant."""
    known = session.leases.get(op.lease_id)
    if known is not None:
        return _repeated(known, op)
    if op.lease_id in session.draining:
        return Gone(op.lease_id)
    _check(state.settings, session, op)
    if (pending := still_waiting(state, session, op)) is not None:
        return pending
    if state.domains.awaits(op.domain):
        return NoCapacity(op.lease_id, NoCapacityReason.DOMAIN_UNKNOWN, _UNLISTED_RETRY_MS)
    config = state.domains.config(op.domain)
    placements = _placements(state, op, config)
    if len(placements) > 1:
        placements.sort(key=lambda placement: placement.cost)
    if placements and op.may_wait and (pending := wait_for(state, session, op, placements[0], now_ns)) is not None:
        end_reservation(state, session.epoch, op.lease_id)
        return pending
    session.stop_waiting(op.lease_id)
    if not placements:
        return NoCapacity(op.lease_id, NoCapacityReason.NO_WORKER, _until_open_ms(state, op, now_ns))
    refusals = []
    for placement in placements:
        answer = _take(state, session, op, placement, now_ns)
        if isinstance(answer, Grant):
            end_reservation(state, session.epoch, op.lease_id)
            demote_ahead(state, placement.worker)
            return answer
        refusals.append(answer)
    passing = [refusal for refusal in refusals if refusal.reason is not NoCapacityReason.NEVER_FITS]
    full = [placement for placement, refusal in zip(placements, refusals, strict=True) if refusal.reason is _POOL_FULL]
    if not passing and len(placements) < len(op.candidates):  # one that grants nothing now may fit it
        return NoCapacity(op.lease_id, NoCapacityReason.NO_WORKER, _until_open_ms(state, op, now_ns))
    return (_owe(state, session, op, full, now_ns) if full else None) or (passing or refusals)[0]


def _owe(state: State, session: Session, op: Acquire, full: list[Placement], now_ns: int) -> NoCapacity | None:
    """Have what is the domain's by right brought back on one worker: where it waits already, or the cheapest."""
    waits_at = state.owed.get((session.epoch, op.lease_id))
    for placement in sorted(full, key=lambda placement: placement.worker is not waits_at):
        count = placement.worker.blocks_for(op.reserve_tokens) - placement.position.num_blocks
        protects = unprotected_blocks(placement.position)
        if owe(state, session.epoch, placement.worker, op.lease_id, placement.account, count, protects, now_ns):
            return NoCapacity(op.lease_id, _POOL_FULL, retry_ms(state))
    return None


def extend(state: State, worker: Worker, lease: Lease, op: Extend, now_ns: int) -> Answer:
    """Grow the lease's own blocks; all or nothing."""
    _check_reservation(state.settings, op.reserve_tokens)
    if lease.last_extend is not None and lease.last_extend[0] == op.reserve_tokens:
        return lease.last_extend[1]
    before = lease.num_blocks
    wanted = worker.blocks_for(op.reserve_tokens)
    if wanted <= before:
        return Extended(op.lease_id, before, b"", b"")
    if not worker.is_open or state.reincarnating:
        return NoCapacity(op.lease_id, NoCapacityReason.NO_WORKER, state.settings.heartbeat_ms)
    count = wanted - before
    key = (lease.epoch, op.lease_id)
    plan = _plan(worker, lease.account, key, wanted, count, newly_protected=0)
    if isinstance(plan, NoCapacity):
        full = plan.reason is _POOL_FULL
        if full and owe(state, lease.epoch, worker, op.lease_id, lease.account, count, 0, now_ns):
            return NoCapacity(op.lease_id, _POOL_FULL, retry_ms(state))
        return plan
    end_reservation(state, lease.epoch, op.lease_id)
    granted = _grant(worker, lease.account, plan, count)
    lease.table += granted.owned
    answer = Extended(op.lease_id, before, granted.owned, granted.zero)
    lease.last_extend = (op.reserve_tokens, answer)
    demote_ahead(state, worker)
    return answer


def _take(state: State, session: Session, op: Acquire, placement: Placement, now_ns: int) -> Grant | NoCapacity:
    """One lease on one worker, or why there is no room for it. Nothing changes unless it is granted."""
    worker, account, tree, position = placement.worker, placement.account, placement.tree, placement.position
    # 1. Decide: how many blocks have to be free, and whose may go for it.
    total = worker.blocks_for(op.reserve_tokens)
    count = total - position.num_blocks
    protects = unprotected_blocks(position)
    partial = find_copy(worker, account, op, position)
    more = blocks_newly_protected(position, partial)
    key = (session.epoch, op.lease_id)
    plan = _plan(worker, account, key, total, count, newly_protected=protects + more)
    if isinstance(plan, NoCapacity) and partial is not None:
        partial = None
        plan = _plan(worker, account, key, total, count, newly_protected=protects)
    if isinstance(plan, NoCapacity):
        if account.is_strict or worker.may_get_room:  # a strict domain is told of its own leases only
            return plan
        return NoCapacity(op.lease_id, NoCapacityReason.NEVER_FITS, _NEVER_RETRY_MS)
    # 2. Pin what is cached, so that nothing evicts it from here on.
    worker.hang_up_tree(tree)
    node = worker.split(account, position)
    nodes = path(node)
    hint = hint_of(op)
    account.eviction.touched(nodes, count, hint, account.cached, now_ns)
    node.last_use_ns = now_ns
    number = state.next_lease_number()
    account.protected += node.pin(number)
    if partial is not None:
        account.protected += partial.node.pin(number)
    worker.quotas.refresh(account)
    # 3. Evict and grant the rest.
    granted = _grant(worker, account, plan, count)
    # 4. Say what was granted.
    shared = b"".join(part.handles for part in nodes)
    grant = Grant(
        lease_id=op.lease_id,
        worker_id=worker.worker_id,
        worker_epoch=worker.epoch,
        num_cached_tokens=position.num_blocks * worker.block_size,
        shared=shared,
        shared_seals=worker.ledger.seals_of(shared),
        owned=granted.owned,
        zero=granted.zero,
    )
    grant = with_copy(worker, grant, partial)
    # 5. Record the lease: others may wait for what it computes.
    lease = Lease(
        number=number,
        lease_id=op.lease_id,
        epoch=session.epoch,
        account=account,
        namespace=op.namespace,
        node=node,
        table=bytearray(shared + granted.owned),
        num_shared=position.num_blocks,
        num_settled=position.num_blocks,
        granted_ns=now_ns,
        grant=grant,
        tree=tree,
        hint=hint,
        copy_node=None if partial is None else partial.node,
    )
    expected = op.tokens if account.config.mode is not Mode.DISABLED else b""
    worker.flights.start(lease, expected, lambda: worker.is_findable(lease))
    worker.leases[number] = lease
    account.leases += 1
    account.query_tokens += 0 if op.skip_match else len(op.tokens) // TOKEN_BYTES
    account.hit_tokens += grant.num_cached_tokens + grant.num_copy_tokens
    session.add(lease, worker)
    return grant


def _placements(state: State, op: Acquire, config: DomainConfig) -> list[Placement]:
    """One per candidate that may grant now. Nothing is changed, but for the account of a domain that is new there."""
    placements: list[Placement] = []
    if state.reincarnating:
        return placements
    num_tokens = len(op.tokens) // TOKEN_BYTES
    matches = config.mode is not Mode.DISABLED and not op.skip_match
    for candidate in op.candidates:
        worker = state.workers.get(candidate.worker_id)
        if worker is None or not worker.is_open or worker.yields or worker.draining:
            continue
        account = worker.use_of(config, state.settings.domains_per_worker_max)
        tree = worker.find_tree(op.domain, op.namespace)
        if tree is None:
            tree = worker.new_tree(op.domain, op.namespace, state.chain_key_at(worker, op.domain, op.namespace))
        position = MatchPosition(tree, 0, 0)
        if matches:
            position = walk(tree, op.tokens, worker.block_bytes, matchable_bytes(op.tokens, worker.block_bytes))
        placement = Placement(
            worker, account, tree, position, num_tokens - position.num_blocks * worker.block_size + candidate.load_cost
        )
        if op.may_wait and matches:
            placement = weigh_waiting(state, op, placement)
        placements.append(placement)
    return placements


def _plan(
    worker: Worker, account: Account, key: ReservationKey, total: int, count: int, *, newly_protected: int
) -> EvictionPlan | NoCapacity:
    """How `count` more blocks can be granted to a lease of `total`, or why not. Changes nothing."""
    if total > worker.quotas.ceiling(account):
        return NoCapacity(key[1], NoCapacityReason.NEVER_FITS, _NEVER_RETRY_MS)
    promised = worker.reservations.promised(account, key)
    plan = worker.quotas.plan(
        account, count, num_free=worker.ledger.num_free, newly_protected=newly_protected, promised=promised
    )
    if isinstance(plan, NoCapacityReason):
        return NoCapacity(key[1], plan, _retry_after_ms(worker, account, plan, count))
    return plan


def _grant(worker: Worker, account: Account, plan: EvictionPlan, count: int) -> Granted:
    """Evict what was decided and lease the blocks."""
    worker.make_room(account, plan)
    granted = worker.ledger.grant(account, count)
    worker.quotas.refresh(account)
    return granted


def _retry_after_ms(worker: Worker, account: Account, reason: NoCapacityReason, count: int) -> int:
    """Little's law: leased blocks come back at a rate of leased / mean time held.

    A domain at its own maximum, and a strict one always, is told of its own leases only.
    """
    if reason is NoCapacityReason.DOMAIN_MAXIMUM:
        leased, mean_hold_ms = account.leased + account.draining, account.mean_hold_ms
    else:
        leased, mean_hold_ms = sum(worker.ledger.counts) - worker.ledger.counts[0], worker.mean_hold_ms
    hint = ceil(mean_hold_ms * min(count, max(1, leased)) / max(1, leased))
    return max(_RETRY_MIN_MS, min(_RETRY_MAX_MS, hint))


def _until_open_ms(state: State, op: Acquire, now_ns: int) -> int:
    """How long until a candidate's window closes at the latest; a heartbeat when none is registered."""
    waiting = [
        worker.window.deadline_ns - now_ns
        for candidate in op.candidates
        if (worker := state.workers.get(candidate.worker_id)) is not None and not worker.is_open
    ]
    if not waiting:
        return state.settings.heartbeat_ms
    return max(_RETRY_MIN_MS, min(state.settings.heartbeat_ms, min(waiting) // NS_PER_MS))


def _repeated(lease: Lease, op: Acquire) -> Answer:
    if lease.account.config.domain != op.domain or lease.namespace != op.namespace:
        raise OpRefused("this lease id is in use for another domain or namespace; choose a new one")
    return lease.grant


def _check(settings: CoreSettings, session: Session, op: Acquire) -> None:
    """Raises OpRefused with what is wrong and what would be right."""
    if len(op.tokens) % TOKEN_BYTES or not op.tokens:
        raise OpRefused(f"tokens have {len(op.tokens)} bytes; they must be packed u32, and at least one")
    if op.reserve_tokens < len(op.tokens) // TOKEN_BYTES:
        raise OpRefused(f"reserve_tokens {op.reserve_tokens} is below the {len(op.tokens) // TOKEN_BYTES} tokens")
    _check_reservation(settings, op.reserve_tokens)
    if len(op.candidates) > settings.candidates_max:
        raise OpRefused(f"{len(op.candidates)} candidates; at most {settings.candidates_max}")
    if len(op.namespace) > settings.name_bytes_max or len(op.domain) > settings.name_bytes_max:
        raise OpRefused(f"domain or namespace is longer than {settings.name_bytes_max} bytes")
    for candidate in op.candidates:
        if candidate.load_cost < 0:
            raise OpRefused("a load_cost is negative")
    if session.num_leases + len(session.draining) >= settings.leases_per_session_max:
        raise OpRefused(f"the session holds its maximum of {settings.leases_per_session_max} leases; release some")


def _check_reservation(settings: CoreSettings, reserve_tokens: int) -> None:
    if not 0 < reserve_tokens <= settings.tokens_max:
        raise OpRefused(f"reserve_tokens {reserve_tokens} must lie between 1 and {settings.tokens_max}")
