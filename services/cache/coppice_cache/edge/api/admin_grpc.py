"""`PrefixIndexAdmin` over gRPC: for operators. Each method delegates to a module of its own.

Whoever reaches the port may call it, as with `PrefixIndex`; browsers do not speak gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

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
    """Every call but `Watch` needs a deadline."""

    def __init__(self, watchers: Watchers, inspection: Inspection) -> None:
        self._watchers = watchers
        self._inspection = inspection

    def add_to(self, server: grpc.Server) -> None:
        cache_admin_pb2_grpc.add_PrefixIndexAdminServicer_to_server(self, server)

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.WatchResponse]:
        """No deadline is asked for: the stream is meant to stay."""
        yield from self._watchers.serve(request, context)

    def DumpTree(self, request: pb.DumpTreeRequest, context: Any) -> pb.DumpTreeResponse:
        return _answer(context, lambda: inspection_grpc.dump_tree(self._inspection, request))

    def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        return _answer(context, lambda: inspection_grpc.explain(self._inspection, request))

    def Audit(self, request: pb.AuditRequest, context: Any) -> pb.AuditResponse:
        """Goes on to its end when the caller does not wait for it."""
        return _answer(context, lambda: inspection_grpc.audit(self._inspection))

    def Invalidate(self, request: pb.InvalidateRequest, context: Any) -> pb.InvalidateResponse:
        return _answer(context, lambda: inspection_grpc.invalidate(self._inspection, request))

    def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinResponse:
        return _answer(context, lambda: inspection_grpc.pin(self._inspection, request))

    def Unpin(self, request: pb.UnpinRequest, context: Any) -> pb.UnpinResponse:
        return _answer(context, lambda: inspection_grpc.unpin(self._inspection, request))

    def ListPins(self, request: pb.ListPinsRequest, context: Any) -> pb.ListPinsResponse:
        return _answer(context, lambda: inspection_grpc.list_pins(self._inspection))


def _answer(context: Any, ask: Callable[[], T]) -> T:
    require_deadline(context)
    try:
        return ask()
    except tuple(_STATUS) as error:
        context.abort(_STATUS[type(error)], str(error))
        raise
