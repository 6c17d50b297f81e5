"""Lease ops and their answers <-> protobuf."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from coppice.edge.frame_codec import MalformedFrame
from coppice.ids import DomainId, LeaseId, Namespace, WorkerEpoch, WorkerId
from coppice.messages import index as m
from coppice_rpc.v1 import cache_pb2 as pb

_REASON_TO_WIRE = {reason: pb.NoCapacity.Reason.Value(reason.name) for reason in m.NoCapacityReason}
_REASON_FROM_WIRE: dict[int, m.NoCapacityReason] = {wire: reason for reason, wire in _REASON_TO_WIRE.items()}
_UNPUBLISHED_TO_WIRE = {reason: pb.NotPublished.Reason.Value(reason.name) for reason in m.NotPublishedReason}
_UNPUBLISHED_FROM_WIRE: dict[int, m.NotPublishedReason] = {
    wire: reason for reason, wire in _UNPUBLISHED_TO_WIRE.items()
}

_REUSE_TO_WIRE = {reuse: pb.Reuse.Value(f"REUSE_{reuse.name}") for reuse in m.Reuse}
_REUSE_FROM_WIRE: dict[int, m.Reuse] = {wire: reuse for reuse, wire in _REUSE_TO_WIRE.items()}

EnumT = TypeVar("EnumT", bound=Enum)


# ---- ops ----


def acquire_to_wire(op: m.Acquire) -> pb.Acquire:
    return pb.Acquire(
        lease_id=op.lease_id,
        domain=op.domain,
        namespace=op.namespace,
        tokens=op.tokens,
        reserve_tokens=op.reserve_tokens,
        candidates=[pb.Candidate(worker_id=c.worker_id, load_cost=c.load_cost) for c in op.candidates],
        traceparent=op.traceparent,
        reuse=_REUSE_TO_WIRE[op.reuse],
        may_wait=op.may_wait,
        wants_copy=op.wants_copy,
        skip_match=op.skip_match,
    )


def acquire_from_wire(wire: pb.Acquire) -> m.Acquire:
    return m.Acquire(
        lease_id=LeaseId(wire.lease_id),
        domain=DomainId(wire.domain),
        namespace=Namespace(wire.namespace),
        tokens=wire.tokens,
        reserve_tokens=wire.reserve_tokens,
        candidates=tuple(m.Candidate(WorkerId(c.worker_id), c.load_cost) for c in wire.candidates),
        traceparent=wire.traceparent,
        reuse=known_value(_REUSE_FROM_WIRE, wire.reuse),
        may_wait=wire.may_wait,
        wants_copy=wire.wants_copy,
        skip_match=wire.skip_match,
    )


def extend_from_wire(wire: pb.Extend) -> m.Extend:
    return m.Extend(LeaseId(wire.lease_id), wire.reserve_tokens)


def publish_from_wire(wire: pb.Publish) -> m.Publish:
    return m.Publish(LeaseId(wire.lease_id), wire.first_block, wire.tokens)


def release_from_wire(wire: pb.Release) -> m.Release:
    return m.Release(LeaseId(wire.lease_id), known_value(_REUSE_FROM_WIRE, wire.reuse))


def retain_to_wire(op: m.Retain) -> pb.Retain:
    return pb.Retain(
        lease_id=op.lease_id,
        first_token=op.first_token,
        end_token=op.end_token,
        priority=op.priority,
        duration_ms=op.duration_ms,
    )


def retain_from_wire(wire: pb.Retain) -> m.Retain:
    return m.Retain(LeaseId(wire.lease_id), wire.first_token, wire.end_token, wire.priority, wire.duration_ms)


def op_to_wire(op: m.Op) -> pb.Op:
    match op:
        case m.Acquire():
            return pb.Op(acquire=acquire_to_wire(op))
        case m.Extend(lease_id, reserve_tokens):
            return pb.Op(extend=pb.Extend(lease_id=lease_id, reserve_tokens=reserve_tokens))
        case m.Publish(lease_id, first_block, tokens):
            return pb.Op(publish=pb.Publish(lease_id=lease_id, first_block=first_block, tokens=tokens))
        case m.Release(lease_id, reuse):
            return pb.Op(release=pb.Release(lease_id=lease_id, reuse=_REUSE_TO_WIRE[reuse]))
        case m.Abandon(lease_id):
            return pb.Op(abandon=pb.Abandon(lease_id=lease_id))
        case m.Distrust(lease_id, handles):
            return pb.Op(distrust=pb.Distrust(lease_id=lease_id, handles=handles))
        case m.Retain():
            return pb.Op(retain=retain_to_wire(op))


def op_from_wire(wire: pb.Op) -> m.Op:
    match wire.WhichOneof("op"):
        case "acquire":
            return acquire_from_wire(wire.acquire)
        case "extend":
            return extend_from_wire(wire.extend)
        case "publish":
            return publish_from_wire(wire.publish)
        case "release":
            return release_from_wire(wire.release)
        case "abandon":
            return m.Abandon(LeaseId(wire.abandon.lease_id))
        case "distrust":
            return m.Distrust(LeaseId(wire.distrust.lease_id), wire.distrust.handles)
        case "retain":
            return retain_from_wire(wire.retain)
        case _:
            raise MalformedFrame("an op names none of acquire, extend, publish, release, abandon, distrust, retain")


# ---- answers ----


def answer_to_wire(answer: m.Answer) -> pb.Answer:
    wire = pb.Answer(lease_id=answer.lease_id)
    match answer:
        case m.Grant():
            wire.grant.CopyFrom(_grant_to_wire(answer))
        case m.NoCapacity(_, reason, retry_after_ms):
            wire.no_capacity.reason, wire.no_capacity.retry_after_ms = _REASON_TO_WIRE[reason], retry_after_ms
        case m.Pending(_, num_tokens, retry_after_ms):
            wire.pending.num_tokens, wire.pending.retry_after_ms = num_tokens, retry_after_ms
        case m.Retained(_, num_tokens):
            wire.retained.CopyFrom(pb.Retained(num_tokens=num_tokens))
        case m.Extended(_, first_block, owned, zero):
            wire.extended.CopyFrom(pb.Extended(first_block=first_block, owned=owned, zero=zero))
        case m.Published(_, blocks, handles, seals):
            wire.published.CopyFrom(pb.Published(num_published_blocks=blocks, handles=handles, seals=seals))
        case m.NotPublished(_, why):
            wire.not_published.reason = _UNPUBLISHED_TO_WIRE[why]
        case m.Released():
            wire.released.SetInParent()
        case m.Distrusted():
            wire.distrusted.SetInParent()
        case m.Gone():
            wire.gone.SetInParent()
        case m.Invalid(_, message):
            wire.invalid.message = message
    return wire


def _grant_to_wire(grant: m.Grant) -> pb.Grant:
    return pb.Grant(
        worker_id=grant.worker_id,
        worker_epoch=grant.worker_epoch,
        num_cached_tokens=grant.num_cached_tokens,
        shared=grant.shared,
        shared_seals=grant.shared_seals,
        owned=grant.owned,
        zero=grant.zero,
        copy_source=grant.copy_source,
        copy_seal=grant.copy_seal,
        num_copy_tokens=grant.num_copy_tokens,
    )


def answer_from_wire(wire: pb.Answer) -> m.Answer:
    lease = LeaseId(wire.lease_id)
    match wire.WhichOneof("answer"):
        case "grant":
            return _grant_from_wire(lease, wire.grant)
        case "no_capacity":
            reason = known_value(_REASON_FROM_WIRE, wire.no_capacity.reason)
            return m.NoCapacity(lease, reason, wire.no_capacity.retry_after_ms)
        case "pending":
            return m.Pending(lease, wire.pending.num_tokens, wire.pending.retry_after_ms)
        case "retained":
            return m.Retained(lease, wire.retained.num_tokens)
        case "extended":
            extended = wire.extended
            return m.Extended(lease, extended.first_block, extended.owned, extended.zero)
        case "published":
            published = wire.published
            return m.Published(lease, published.num_published_blocks, published.handles, published.seals)
        case "not_published":
            return m.NotPublished(lease, known_value(_UNPUBLISHED_FROM_WIRE, wire.not_published.reason))
        case "released":
            return m.Released(lease)
        case "distrusted":
            return m.Distrusted(lease)
        case "gone":
            return m.Gone(lease)
        case "invalid":
            return m.Invalid(lease, wire.invalid.message)
        case _:
            raise MalformedFrame("an answer that names no kind")


def _grant_from_wire(lease: LeaseId, wire: pb.Grant) -> m.Grant:
    return m.Grant(
        lease_id=lease,
        worker_id=WorkerId(wire.worker_id),
        worker_epoch=WorkerEpoch(wire.worker_epoch),
        num_cached_tokens=wire.num_cached_tokens,
        shared=wire.shared,
        shared_seals=wire.shared_seals,
        owned=wire.owned,
        zero=wire.zero,
        copy_source=wire.copy_source,
        copy_seal=wire.copy_seal,
        num_copy_tokens=wire.num_copy_tokens,
    )


def known_value(table: dict[int, EnumT], wire: int) -> EnumT:
    if wire not in table:
        raise MalformedFrame(f"unknown enum value {wire}: the peer speaks a newer protocol")
    return table[wire]
