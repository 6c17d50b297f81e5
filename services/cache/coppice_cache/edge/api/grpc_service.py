"""`PrefixIndex` over gRPC: lease ops and questions one at a time, for clients that keep no session open."""

from __future__ import annotations

from typing import Any, TypeVar

import grpc
from msgspec.structs import replace

from coppice.ids import LEASE_ID_BYTES, TOKEN_BYTES, DomainId, Namespace, SchedulerEpoch, WorkerId
from coppice.messages.index import Abandon, Acquire, Extend, Invalid, MatchQueries, Op, Publish, Release, Retain
from coppice.telemetry.trace_context import context_from_metadata, traceparent_of
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.edge.api.grpc_messages import UnknownValue, answer_to_wire, record_from_wire, wire_from_record
from coppice_cache.edge.service.service import IndexService
from coppice_rpc.v1 import cache_pb2 as pb
from coppice_rpc.v1 import cache_pb2_grpc

SERVICES = ("coppice_rpc.v1.PrefixIndex",)
NAME_BYTES_MAX = 128
NO_SESSION = SchedulerEpoch(0)  # never minted
DEADLINE_S_MAX = 366 * 86_400.0

_INVALID = grpc.StatusCode.INVALID_ARGUMENT
OpT = TypeVar("OpT", bound=Op)


class PrefixIndexServicer(cache_pb2_grpc.PrefixIndexServicer):
    """Refused before anything changes: a call without a deadline, a wrong length, a session that is not there."""

    def __init__(self, service: IndexService) -> None:
        self._service = service

    def add_to(self, server: grpc.Server) -> None:
        cache_pb2_grpc.add_PrefixIndexServicer_to_server(self, server)

    # ---- sessions ----

    def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.OpenSessionResponse:
        require_deadline(context)
        if len(request.name.encode()) > NAME_BYTES_MAX:
            context.abort(_INVALID, f"name has {len(request.name.encode())} bytes; at most {NAME_BYTES_MAX}")
        try:
            name = self._service.clients.open_unary()
        except MessageRefused as refused:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(refused))
        return pb.OpenSessionResponse(
            session_epoch=name,
            cache_epoch=self._service.cache_epoch,
            ttl_ms=self._service.settings.session_ttl_ms,
        )

    def RenewSession(self, request: pb.RenewSessionRequest, context: Any) -> pb.RenewSessionResponse:
        require_deadline(context)
        return pb.RenewSessionResponse(gone=self._renew(request.session_epoch) is None)

    def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        """Also succeeds for a session that is gone."""
        require_deadline(context)
        self._service.clients.close_unary(request.session_epoch)
        return pb.CloseSessionResponse()

    # ---- ops ----

    def Acquire(self, request: pb.AcquireRequest, context: Any) -> pb.Answer:
        require_deadline(context)
        op = _parsed(context, Acquire, request.acquire)
        if not op.traceparent and self._service.observer.is_watching:
            op = replace(op, traceparent=traceparent_of(context_from_metadata(context.invocation_metadata())))
        return self._execute(request.session_epoch, op, context)

    def Extend(self, request: pb.ExtendRequest, context: Any) -> pb.Answer:
        require_deadline(context)
        return self._execute(request.session_epoch, record_from_wire(Extend, request.extend), context)

    def Publish(self, request: pb.PublishRequest, context: Any) -> pb.Answer:
        require_deadline(context)
        return self._execute(request.session_epoch, record_from_wire(Publish, request.publish), context)

    def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.Answer:
        require_deadline(context)
        op: Op = _parsed(context, Release, request.release)
        if request.through_fence:
            op = Abandon(op.lease_id)
        return self._execute(request.session_epoch, op, context)

    def Retain(self, request: pb.RetainRequest, context: Any) -> pb.Answer:
        require_deadline(context)
        return self._execute(request.session_epoch, record_from_wire(Retain, request.retain), context)

    def _execute(self, session_epoch: int, op: Op, context: Any) -> pb.Answer:
        if len(op.lease_id) != LEASE_ID_BYTES:
            context.abort(_INVALID, f"lease_id has {len(op.lease_id)} bytes; it must have {LEASE_ID_BYTES}")
        epoch = self._renew(session_epoch)
        if epoch is None:
            if isinstance(op, Acquire):
                context.abort(
                    grpc.StatusCode.NOT_FOUND,
                    f"no session {session_epoch}: never opened, closed or expired; open one with OpenSession",
                )
            # A lease of a session that is gone is gone itself, and releasing it succeeds: so the core answers for a
            # session that never was. An epoch that belongs to a stream must not be reached from here.
            epoch = NO_SESSION
        answer = self._service.execute(epoch, op)
        if isinstance(answer, Invalid):
            context.abort(_INVALID, answer.message)
        return answer_to_wire(answer)

    def _renew(self, session_epoch: int) -> SchedulerEpoch | None:
        return self._service.clients.renew_unary(session_epoch)

    # ---- questions ----

    def ListWorkers(self, request: pb.ListWorkersRequest, context: Any) -> pb.Workers:
        require_deadline(context)
        return wire_from_record(pb.Workers, self._service.list_workers())

    def Match(self, request: pb.MatchRequest, context: Any) -> pb.MatchResponse:
        require_deadline(context)
        if len(request.tokens) % TOKEN_BYTES:
            context.abort(
                _INVALID,
                f"tokens has {len(request.tokens)} bytes; packed tokens are {TOKEN_BYTES} bytes each",
            )
        if not request.domain:
            context.abort(_INVALID, "domain is empty")
        known = {worker.worker_id for worker in self._service.list_workers().workers}
        if request.worker_id not in known:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no worker {request.worker_id!r} is registered")
        found = self._service.match(
            DomainId(request.domain), Namespace(request.namespace), request.tokens, WorkerId(request.worker_id)
        )
        return pb.MatchResponse(num_cached_tokens=found.num_cached_tokens)

    def MatchBatch(self, request: pb.MatchQueries, context: Any) -> pb.MatchHints:
        require_deadline(context)
        try:
            found = self._service.match_all(record_from_wire(MatchQueries, request))
            return wire_from_record(pb.MatchHints, found)
        except MessageRefused as refused:
            context.abort(_INVALID, str(refused))
            raise

    def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        require_deadline(context)
        stats = self._service.stats()
        domains = [
            pb.DomainStats(
                worker_id=domain.worker_id,
                domain=domain.domain,
                leased_blocks=domain.leased_blocks,
                cached_blocks=domain.cached_blocks,
                draining_blocks=domain.draining_blocks,
            )
            for worker in stats.workers
            for domain in worker.domains
        ]
        return pb.StatsResponse(
            cache_epoch=stats.cache_epoch,
            num_blocks=sum(worker.num_blocks for worker in stats.workers),
            free_blocks=stats.free_blocks,
            leased_blocks=stats.leased_blocks,
            cached_blocks=stats.cached_blocks,
            draining_blocks=stats.draining_blocks,
            leases=stats.leases,
            sessions=stats.sessions,
            domains=domains,
        )


def _parsed(context: Any, kind: type[OpT], wire: Any) -> OpT:
    """An op, or INVALID_ARGUMENT for an enum value that is unknown here."""
    try:
        return record_from_wire(kind, wire)
    except UnknownValue as error:
        context.abort(_INVALID, str(error))
        raise


def require_deadline(context: Any) -> None:
    # Without a deadline, gRPC for Python reports one that lies centuries ahead.
    remaining_s = context.time_remaining()
    if remaining_s is None or remaining_s > DEADLINE_S_MAX:
        context.abort(_INVALID, "this call has no deadline; give one, so that a lost answer cannot hold you for ever")
