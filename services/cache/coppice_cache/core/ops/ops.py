"""The ops of a client. Each is idempotent under its lease id and changes nothing unless it succeeds."""

from __future__ import annotations

from msgspec.structs import replace

from coppice.ids import LEASE_ID_BYTES, LeaseId
from coppice.messages.index import (
    Abandon,
    Acquire,
    Answer,
    Distrust,
    Distrusted,
    Extend,
    Gone,
    Invalid,
    NoCapacity,
    NoCapacityReason,
    NotPublished,
    NotPublishedReason,
    Op,
    Publish,
    Release,
    Released,
    Retain,
    Retained,
)
from coppice.messages.reuse import Outcome, Reuse
from coppice_cache.core.base.errors import OpRefused
from coppice_cache.core.eviction.policy import ReuseHint
from coppice_cache.core.ops.grants import acquire, extend
from coppice_cache.core.ops.invalidation import distrust
from coppice_cache.core.ops.publication import publish
from coppice_cache.core.ops.reclaim import end_reservation
from coppice_cache.core.ops.retention import retain
from coppice_cache.core.pool.leases import Lease
from coppice_cache.core.state.sessions import Session
from coppice_cache.core.state.state import NS_PER_MS, State
from coppice_cache.core.state.workers import Worker

_HOLD_WEIGHT = 0.125  # of the newest lease in the mean time that leases are held


def execute(state: State, session: Session, op: Op, now_ns: int) -> Answer:
    """One op of a live session."""
    try:
        if len(op.lease_id) != LEASE_ID_BYTES:
            raise OpRefused(f"lease_id has {len(op.lease_id)} bytes; it must have {LEASE_ID_BYTES}")
        return _dispatch(state, session, op, now_ns)
    except OpRefused as refused:
        return Invalid(op.lease_id, str(refused))


def execute_unknown(op: Op) -> Answer:
    """One op of a session that is not live here: it has no leases."""
    if isinstance(op, Acquire):
        return Invalid(op.lease_id, "this session has ended or never was; attach again for a new scheduler epoch")
    if isinstance(op, Release | Abandon):
        return Released(op.lease_id)
    if isinstance(op, Distrust):
        return Distrusted(op.lease_id)
    return Gone(op.lease_id)


def _dispatch(state: State, session: Session, op: Op, now_ns: int) -> Answer:
    if op.lease_id in session.claims:
        return _claimed(state, session, op)
    if isinstance(op, Acquire):
        namespace = state.with_keyed_salt(op.domain, op.namespace)
        return acquire(state, session, op if namespace == op.namespace else replace(op, namespace=namespace), now_ns)
    lease = session.leases.get(op.lease_id)
    if isinstance(op, Release | Abandon):
        session.stop_waiting(op.lease_id)
        end_reservation(state, session.epoch, op.lease_id)
        if lease is not None:
            worker = session.workers[op.lease_id]
            if isinstance(op, Release):
                release(session, worker, lease, now_ns, op.reuse, op.outcome)
            else:
                abandon(state, session, worker, lease)
        return Released(op.lease_id)
    if isinstance(op, Distrust):
        return Distrusted(op.lease_id) if lease is None else distrust(session.workers[op.lease_id], lease, op)
    if lease is None:
        return Gone(op.lease_id)
    if isinstance(op, Retain):
        return retain(session.workers[op.lease_id], lease, op, now_ns)
    if isinstance(op, Extend):
        return extend(state, session.workers[op.lease_id], lease, op, now_ns)
    return publish(state, session.workers[op.lease_id], lease, op, now_ns)


def release(
    session: Session,
    worker: Worker,
    lease: Lease,
    now_ns: int,
    reuse: Reuse = Reuse.UNKNOWN,
    outcome: Outcome = Outcome.UNKNOWN,
) -> None:
    """The holder's word that nothing of the lease runs, and what it knows of the future of the sequence."""
    session.remove(lease.lease_id)
    held_ms = (now_ns - lease.granted_ns) / NS_PER_MS
    worker.mean_hold_ms += _HOLD_WEIGHT * (held_ms - worker.mean_hold_ms)
    lease.account.mean_hold_ms += _HOLD_WEIGHT * (held_ms - lease.account.mean_hold_ms)
    lease.node.last_use_ns = now_ns
    says_more = reuse is not Reuse.UNKNOWN or outcome is not Outcome.UNKNOWN
    if says_more and lease.tree is not None and not lease.node.children:
        # Another word than the client's first one is the scheduler's own: it says nothing of calls of that kind.
        hint = lease.hint if reuse is lease.hint.reuse else ReuseHint(reuse)
        lease.account.eviction.hinted(lease.node, hint._replace(outcome=outcome))
    worker.finish(lease)


def abandon(state: State, session: Session, worker: Worker, lease: Lease) -> None:
    """Release through a fence that names the lease."""
    session.drain(lease.lease_id)
    end_reservation(state, session.epoch, lease.lease_id)
    state.fence_leases(worker, lease)


def drop_claim(state: State, session: Session, lease_id: LeaseId) -> None:
    """Give up a claim whose worker is not here yet; its fence will name the lease when it comes."""
    worker_id = session.claims[lease_id]
    session.drop_claim(lease_id)
    held = state.held_claims[worker_id]
    del held[session.epoch, lease_id]
    if not held:
        del state.held_claims[worker_id]
    state.refused_ids.setdefault(worker_id, set()).add(lease_id)


def _claimed(state: State, session: Session, op: Op) -> Answer:
    """An op on a lease of before the restart, before its worker registered."""
    if isinstance(op, Release | Abandon):
        drop_claim(state, session, op.lease_id)
        return Released(op.lease_id)
    if isinstance(op, Publish):
        return NotPublished(op.lease_id, NotPublishedReason.TREE_GONE)
    if isinstance(op, Distrust):
        return Distrusted(op.lease_id)
    if isinstance(op, Retain):
        return Retained(op.lease_id, 0)
    return NoCapacity(op.lease_id, NoCapacityReason.NO_WORKER, state.settings.heartbeat_ms)
