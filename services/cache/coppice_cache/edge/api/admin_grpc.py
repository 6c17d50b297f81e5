"""`PrefixIndexAdmin` over gRPC: for operators. Each method delegates to a module of its own.

With TLS an operator's certificate is asked for (`coppice.tls.rights`). Without, whoever reaches the port may call it;
browsers do not speak gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from coppice.audit_log import Act, AuditLog
from coppice.edge.grpc_tls import who_calls
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.edge.api import inspection_grpc
from coppice_cache.edge.api.grpc_service import require_deadline
from coppice_cache.edge.api.inspection import Inspection, NotThere
from coppice_cache.edge.events.watching import Watchers
from coppice_cache.edge.service.auditor import AuditRunning, AuditStopped
from coppice_rpc.v1 import cache_admin_pb2 as pb
from coppice_rpc.v1 import cache_admin_pb2_grpc

ADMIN_SERVICES = ("coppice_rpc.v1.PrefixIndexAdmin",)

_STATUS: dict[type[Exception], grpc.StatusCode] = {
    MessageRefused: grpc.StatusCode.INVALID_ARGUMENT,
    NotThere: grpc.StatusCode.NOT_FOUND,
    AuditRunning: grpc.StatusCode.FAILED_PRECONDITION,
    AuditStopped: grpc.StatusCode.UNAVAILABLE,
}
T = TypeVar("T")


class PrefixIndexAdminServicer(cache_admin_pb2_grpc.PrefixIndexAdminServicer):
    """Every call but `Watch` needs a deadline. Without `audit` acts go to the log."""

    def __init__(self, watchers: Watchers, inspection: Inspection, audit: AuditLog | None = None) -> None:
        self._watchers = watchers
        self._inspection = inspection
        self._audit = audit or AuditLog("cache")

    def add_to(self, server: grpc.Server) -> None:
        cache_admin_pb2_grpc.add_PrefixIndexAdminServicer_to_server(self, server)

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.WatchResponse]:
        """No deadline is asked for: the stream is meant to stay. Its line is written when it begins."""
        act = _act(context, "watch")
        act.note(domains=request.domains, with_tokens=request.with_tokens)
        has_begun = False
        try:
            for message in self._watchers.serve(request, context):
                if not has_begun:
                    has_begun = True
                    self._audit.ended(act, done=True)
                yield message
        finally:
            if not has_begun:
                self._audit.ended(act, done=False, code=_code_of(context))

    def DumpTree(self, request: pb.DumpTreeRequest, context: Any) -> pb.DumpTreeResponse:
        return _answer(context, lambda: inspection_grpc.dump_tree(self._inspection, request))

    def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        return self._do(context, "explain", lambda act: inspection_grpc.explain(self._inspection, request, act))

    def Audit(self, request: pb.AuditRequest, context: Any) -> pb.AuditResponse:
        """Goes on to its end when the caller does not wait for it."""
        return self._do(context, "audit", lambda act: inspection_grpc.audit(self._inspection, act))

    def Invalidate(self, request: pb.InvalidateRequest, context: Any) -> pb.InvalidateResponse:
        return self._do(context, "invalidate", lambda act: inspection_grpc.invalidate(self._inspection, request, act))

    def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinResponse:
        return self._do(context, "pin", lambda act: inspection_grpc.pin(self._inspection, request, act))

    def Unpin(self, request: pb.UnpinRequest, context: Any) -> pb.UnpinResponse:
        return self._do(context, "unpin", lambda act: inspection_grpc.unpin(self._inspection, request, act))

    def ListPins(self, request: pb.ListPinsRequest, context: Any) -> pb.ListPinsResponse:
        return _answer(context, lambda: inspection_grpc.list_pins(self._inspection))

    def _do(self, context: Any, verb: str, ask: Callable[[Act], T]) -> T:
        """An answer that leaves a line in the audit log, and so does a refusal."""
        act = _act(context, verb)
        try:
            answer = _answer(context, lambda: ask(act))
        except BaseException:
            self._audit.ended(act, done=False, code=_code_of(context))
            raise
        self._audit.ended(act, done=True)
        return answer


def _act(context: Any, verb: str) -> Act:
    return Act(verb, who_calls(context), "gRPC")


def _code_of(context: Any) -> str:
    """What the call was ended with; UNKNOWN for our own bugs."""
    code = context.code()
    return code.name if code is not None else grpc.StatusCode.UNKNOWN.name


def _answer(context: Any, ask: Callable[[], T]) -> T:
    require_deadline(context)
    try:
        return ask()
    except tuple(_STATUS) as error:
        context.abort(_STATUS[type(error)], str(error))
        raise
