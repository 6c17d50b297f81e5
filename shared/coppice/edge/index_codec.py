"""Lease ops, answers and reconciliation <-> protobuf (the session between a client and the cache service)."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from coppice.edge.frame_codec import BodyField, FrameCodec, MalformedFrame
from coppice.ids import CacheEpoch, DomainId, LeaseId, Namespace, WorkerEpoch, WorkerId
from coppice.messages import index as m
from coppice_rpc.v1 import cache_pb2 as pb

_REASON_TO_WIRE = {reason: pb.NoCapacity.Reason.Value(reason.name) for reason in m.NoCapacityReason}
_REASON_FROM_WIRE: dict[int, m.NoCapacityReason] = {wire: reason for reason, wire in _REASON_TO_WIRE.items()}
_UNPUBLISHED_TO_WIRE = {reason: pb.NotPublished.Reason.Value(reason.name) for reason in m.NotPublishedReason}
_UNPUBLISHED_FROM_WIRE: dict[int, m.NotPublishedReason] = {
    wire: reason for reason, wire in _UNPUBLISHED_TO_WIRE.items()
}

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
    )


def extend_from_wire(wire: pb.Extend) -> m.Extend:
    return m.Extend(LeaseId(wire.lease_id), wire.reserve_tokens)


def publish_from_wire(wire: pb.Publish) -> m.Publish:
    return m.Publish(LeaseId(wire.lease_id), wire.first_block, wire.tokens)


def op_to_wire(op: m.Op) -> pb.Op:
    match op:
        case m.Acquire():
            return pb.Op(acquire=acquire_to_wire(op))
        case m.Extend(lease_id, reserve_tokens):
            return pb.Op(extend=pb.Extend(lease_id=lease_id, reserve_tokens=reserve_tokens))
        case m.Publish(lease_id, first_block, tokens):
            return pb.Op(publish=pb.Publish(lease_id=lease_id, first_block=first_block, tokens=tokens))
        case m.Release(lease_id):
            return pb.Op(release=pb.Release(lease_id=lease_id))
        case m.Abandon(lease_id):
            return pb.Op(abandon=pb.Abandon(lease_id=lease_id))
        case m.Distrust(lease_id, handles):
            return pb.Op(distrust=pb.Distrust(lease_id=lease_id, handles=handles))


def op_from_wire(wire: pb.Op) -> m.Op:
    match wire.WhichOneof("op"):
        case "acquire":
            return acquire_from_wire(wire.acquire)
        case "extend":
            return extend_from_wire(wire.extend)
        case "publish":
            return publish_from_wire(wire.publish)
        case "release":
            return m.Release(LeaseId(wire.release.lease_id))
        case "abandon":
            return m.Abandon(LeaseId(wire.abandon.lease_id))
        case "distrust":
            return m.Distrust(LeaseId(wire.distrust.lease_id), wire.distrust.handles)
        case _:
            raise MalformedFrame("an op names none of acquire, extend, publish, release, abandon, distrust")


# ---- answers ----


def answer_to_wire(answer: m.Answer) -> pb.Answer:
    wire = pb.Answer(lease_id=answer.lease_id)
    match answer:
        case m.Grant():
            wire.grant.CopyFrom(_grant_to_wire(answer))
        case m.NoCapacity(_, reason, retry_after_ms):
            wire.no_capacity.reason, wire.no_capacity.retry_after_ms = _REASON_TO_WIRE[reason], retry_after_ms
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
    )


def answer_from_wire(wire: pb.Answer) -> m.Answer:
    lease = LeaseId(wire.lease_id)
    match wire.WhichOneof("answer"):
        case "grant":
            return _grant_from_wire(lease, wire.grant)
        case "no_capacity":
            reason = _known(_REASON_FROM_WIRE, wire.no_capacity.reason)
            return m.NoCapacity(lease, reason, wire.no_capacity.retry_after_ms)
        case "extended":
            extended = wire.extended
            return m.Extended(lease, extended.first_block, extended.owned, extended.zero)
        case "published":
            published = wire.published
            return m.Published(lease, published.num_published_blocks, published.handles, published.seals)
        case "not_published":
            return m.NotPublished(lease, _known(_UNPUBLISHED_FROM_WIRE, wire.not_published.reason))
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
    )


def _known(table: dict[int, EnumT], wire: int) -> EnumT:
    if wire not in table:
        raise MalformedFrame(f"unknown enum value {wire}: the peer speaks a newer protocol")
    return table[wire]


# ---- session bodies ----


def _ops_to_wire(batch: m.OpBatch) -> pb.OpBatch:
    return pb.OpBatch(ops=[op_to_wire(op) for op in batch.ops])


def _ops_from_wire(wire: pb.OpBatch) -> m.OpBatch:
    return m.OpBatch(tuple(op_from_wire(op) for op in wire.ops))


def _answers_to_wire(batch: m.AnswerBatch) -> pb.AnswerBatch:
    return pb.AnswerBatch(cache_epoch=batch.cache_epoch, answers=[answer_to_wire(answer) for answer in batch.answers])


def _answers_from_wire(wire: pb.AnswerBatch) -> m.AnswerBatch:
    return m.AnswerBatch(CacheEpoch(wire.cache_epoch), tuple(answer_from_wire(answer) for answer in wire.answers))


def workers_to_wire(message: m.Workers) -> pb.Workers:
    return pb.Workers(
        cache_epoch=message.cache_epoch,
        workers=[
            pb.WorkerInfo(
                worker_id=info.worker_id,
                worker_epoch=info.worker_epoch,
                address=info.address,
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                namespace=info.namespace,
                model=info.model,
                open=info.open,
                max_sequences=info.max_sequences,
                max_step_tokens=info.max_step_tokens,
                max_context=info.max_context,
                draining=info.draining,
            )
            for info in message.workers
        ],
    )


def workers_from_wire(wire: pb.Workers) -> m.Workers:
    infos = tuple(
        m.WorkerInfo(
            worker_id=WorkerId(info.worker_id),
            worker_epoch=WorkerEpoch(info.worker_epoch),
            address=info.address,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            namespace=Namespace(info.namespace),
            model=info.model,
            open=info.open,
            max_sequences=info.max_sequences,
            max_step_tokens=info.max_step_tokens,
            max_context=info.max_context,
            draining=info.draining,
        )
        for info in wire.workers
    )
    return m.Workers(CacheEpoch(wire.cache_epoch), infos)


def _reattach_to_wire(message: m.Reattach) -> pb.Reattach:
    return pb.Reattach(
        claims=[
            pb.LeaseClaim(
                lease_id=claim.lease_id,
                domain=claim.domain,
                namespace=claim.namespace,
                worker_id=claim.worker_id,
                worker_epoch=claim.worker_epoch,
                shared=claim.shared,
                shared_seals=claim.shared_seals,
                owned=claim.owned,
            )
            for claim in message.claims
        ]
    )


def _reattach_from_wire(wire: pb.Reattach) -> m.Reattach:
    claims = tuple(
        m.LeaseClaim(
            lease_id=LeaseId(claim.lease_id),
            domain=DomainId(claim.domain),
            namespace=Namespace(claim.namespace),
            worker_id=WorkerId(claim.worker_id),
            worker_epoch=WorkerEpoch(claim.worker_epoch),
            shared=claim.shared,
            shared_seals=claim.shared_seals,
            owned=claim.owned,
        )
        for claim in wire.claims
    )
    return m.Reattach(claims)


def _reattached_to_wire(message: m.Reattached) -> pb.Reattached:
    return pb.Reattached(cache_epoch=message.cache_epoch, accepted=message.accepted, refused=message.refused)


def _reattached_from_wire(wire: pb.Reattached) -> m.Reattached:
    accepted = tuple(LeaseId(lease) for lease in wire.accepted)
    return m.Reattached(CacheEpoch(wire.cache_epoch), accepted, tuple(LeaseId(lease) for lease in wire.refused))


CLIENT_FRAMES = FrameCodec(
    pb.IndexClientFrame,
    (
        BodyField("ops", m.OpBatch, _ops_to_wire, _ops_from_wire),
        BodyField("reattach", m.Reattach, _reattach_to_wire, _reattach_from_wire),
        BodyField(
            "lease_set",
            m.LeaseSet,
            lambda body: pb.LeaseSet(lease_ids=body.lease_ids),
            lambda wire: m.LeaseSet(tuple(LeaseId(lease) for lease in wire.lease_ids)),
        ),
    ),
)

SERVER_FRAMES = FrameCodec(
    pb.IndexServerFrame,
    (
        BodyField("answers", m.AnswerBatch, _answers_to_wire, _answers_from_wire),
        BodyField("workers", m.Workers, workers_to_wire, workers_from_wire),
        BodyField("reattached", m.Reattached, _reattached_to_wire, _reattached_from_wire),
        BodyField(
            "digest",
            m.LeaseDigest,
            lambda body: pb.LeaseDigest(count=body.count, digest=body.digest),
            lambda wire: m.LeaseDigest(wire.count, wire.digest),
        ),
    ),
)
