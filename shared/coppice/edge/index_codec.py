"""Bodies of the session between a client and the cache service <-> protobuf: batches, reconciliation, hints."""

from __future__ import annotations

from collections.abc import Iterable

from coppice.edge.frame_codec import BodyField, Edge, FrameCodec
from coppice.edge.op_codec import answer_from_wire, answer_to_wire, op_from_wire, op_to_wire
from coppice.ids import CacheEpoch, DomainId, LeaseId, Namespace, WorkerEpoch, WorkerId
from coppice.messages import index as m
from coppice_rpc.v1 import cache_pb2 as pb


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
                num_host_blocks=info.num_host_blocks,
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
            num_host_blocks=info.num_host_blocks,
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
        ],
        dead_workers=[
            pb.DeadWorker(worker_id=dead.worker_id, worker_epoch=dead.worker_epoch) for dead in message.dead_workers
        ],
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
    dead = tuple(m.DeadWorker(WorkerId(one.worker_id), WorkerEpoch(one.worker_epoch)) for one in wire.dead_workers)
    return m.Reattach(claims, dead)


def _reattached_to_wire(message: m.Reattached) -> pb.Reattached:
    return pb.Reattached(
        cache_epoch=message.cache_epoch,
        accepted=message.accepted,
        refused=message.refused,
        settled_blocks=message.settled_blocks,
    )


def _reattached_from_wire(wire: pb.Reattached) -> m.Reattached:
    return m.Reattached(
        cache_epoch=CacheEpoch(wire.cache_epoch),
        accepted=_lease_ids(wire.accepted),
        refused=_lease_ids(wire.refused),
        settled_blocks=tuple(wire.settled_blocks),
    )


def _lease_ids(wire: Iterable[bytes]) -> tuple[LeaseId, ...]:
    return tuple(LeaseId(lease) for lease in wire)


def match_queries_to_wire(message: m.MatchQueries) -> pb.MatchQueries:
    return pb.MatchQueries(
        queries=[pb.MatchQuery(domain=q.domain, namespace=q.namespace, tokens=q.tokens) for q in message.queries]
    )


def match_queries_from_wire(wire: pb.MatchQueries) -> m.MatchQueries:
    return m.MatchQueries(
        tuple(m.MatchQuery(DomainId(q.domain), Namespace(q.namespace), q.tokens) for q in wire.queries)
    )


def match_hints_to_wire(message: m.MatchHints) -> pb.MatchHints:
    hints = [pb.MatchHint(worker_ids=h.worker_ids, num_cached_tokens=h.num_cached_tokens) for h in message.hints]
    return pb.MatchHints(cache_epoch=message.cache_epoch, hints=hints)


def match_hints_from_wire(wire: pb.MatchHints) -> m.MatchHints:
    hints = (m.MatchHint(tuple(WorkerId(w) for w in h.worker_ids), tuple(h.num_cached_tokens)) for h in wire.hints)
    return m.MatchHints(CacheEpoch(wire.cache_epoch), tuple(hints))


def _reclaim_to_wire(message: m.Reclaim) -> pb.Reclaim:
    return pb.Reclaim(
        cache_epoch=message.cache_epoch,
        worker_id=message.worker_id,
        domain=message.domain,
        num_blocks=message.num_blocks,
    )


def _reclaim_from_wire(wire: pb.Reclaim) -> m.Reclaim:
    return m.Reclaim(CacheEpoch(wire.cache_epoch), WorkerId(wire.worker_id), DomainId(wire.domain), wire.num_blocks)


CLIENT_FRAMES = FrameCodec(
    pb.IndexClientFrame,
    (
        BodyField("ops", m.OpBatch, _ops_to_wire, _ops_from_wire),
        BodyField("reattach", m.Reattach, _reattach_to_wire, _reattach_from_wire),
        BodyField(
            "lease_set",
            m.LeaseSet,
            lambda body: pb.LeaseSet(lease_ids=body.lease_ids),
            lambda wire: m.LeaseSet(_lease_ids(wire.lease_ids)),
        ),
        BodyField("match_queries", m.MatchQueries, match_queries_to_wire, match_queries_from_wire),
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
        BodyField(
            "wake",
            m.Wake,
            lambda body: pb.Wake(cache_epoch=body.cache_epoch, lease_ids=body.lease_ids),
            lambda wire: m.Wake(CacheEpoch(wire.cache_epoch), _lease_ids(wire.lease_ids)),
        ),
        BodyField("reclaim", m.Reclaim, _reclaim_to_wire, _reclaim_from_wire),
        BodyField("match_hints", m.MatchHints, match_hints_to_wire, match_hints_from_wire),
    ),
)

EDGE = Edge("index", CLIENT_FRAMES, SERVER_FRAMES)
