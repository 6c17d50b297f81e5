"""gRPC over TLS between services: both ends show certificates, and each call needs a role.

The versions of TLS are gRPC's own: two ends of ours speak 1.3.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, TypeVar

import grpc

from coppice.audit_log import Act, AuditLog
from coppice.edge.told_once import ToldOnce
from coppice.tls.credentials import Credentials
from coppice.tls.identity import ANY_GRPC_NAME, Identity, NoIdentity, Role, grpc_name, identity_among
from coppice.tls.rights import RPCS, why_not_rpc

LoadedT = TypeVar("LoadedT")
_log = logging.getLogger(__name__)
_NAMES = "x509_subject_alternative_name"
_OF_ALL = frozenset(Role)
_MAKERS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def server_credentials(tls: Credentials) -> grpc.ServerCredentials:
    """Each new connection is shown the files as they are then."""

    def configured(pem: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
        certificate, key, ca = pem
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=ca)

    return reloaded_credentials(tls.pem, configured, asks_clients=True)


def reloaded_credentials(
    read: Callable[[], LoadedT],
    configured: Callable[[LoadedT], grpc.ServerCertificateConfiguration],
    *,
    asks_clients: bool,
) -> grpc.ServerCredentials:
    """Each new connection is shown what `read` gives then: the same object until it has changed.

    gRPC is told only of changes. It takes away what connections that begin at the same moment still use, which ends the
    process (1.85.1: "Check failed: prior > 0"); told at each connection, it does so after some ten thousand of them.
    """
    changing = Lock()
    shown = read()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        with changing:
            now = read()
            if now is shown:
                return None
            shown = now
        return configured(now)

    fetch: Any = changed  # the stubs do not know of None
    return grpc.dynamic_ssl_server_credentials(configured(shown), fetch, require_client_authentication=asks_clients)


def open_channel(
    address: str, tls: Credentials | None, options: Sequence[tuple[str, Any]] = (), *, server: Role | None = None
) -> grpc.Channel:
    """`server`: the role that must answer; None for any. A channel keeps the files as they are now."""
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    certificate, key, ca = tls.pem()
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    name = ANY_GRPC_NAME if server is None else grpc_name(server)
    return grpc.secure_channel(address, credentials, options=(*options, ("grpc.ssl_target_name_override", name)))


class RoleCheck(grpc.ServerInterceptor):
    """Refuses calls with PERMISSION_DENIED, as `coppice.tls.rights` has it. Who is refused is told once for each
    method, with a line in `audit` where there is one."""

    def __init__(self, audit: AuditLog | None = None) -> None:
        self._told = ToldOnce()
        self._audit = audit

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or RPCS.get(method) == _OF_ALL:
            return handler
        attribute, make = _MAKERS[handler.request_streaming, handler.response_streaming]
        behaviour = getattr(handler, attribute)

        def checked(request: Any, context: grpc.ServicerContext) -> Any:
            if why_not := _why_not(context, method):
                if self._told.is_new(why_not):
                    _log.warning("a call was refused: %s", why_not)
                    if self._audit is not None:
                        act = Act(method.rpartition("/")[2].lower(), who_calls(context), "gRPC")
                        self._audit.ended(act, done=False, code=grpc.StatusCode.PERMISSION_DENIED.name)
                context.abort(grpc.StatusCode.PERMISSION_DENIED, why_not)
            return behaviour(request, context)

        return make(checked, handler.request_deserializer, handler.response_serializer)


def who_calls(context: Any) -> str:
    """The identity in the caller's certificate; without one, the address that the call came from."""
    try:
        return str(_identity_of(context))
    except NoIdentity:
        return str(context.peer())


def party_of(context: Any) -> str:
    """Who shares bounds with whom: the identity in the caller's certificate; without one, the caller's host."""
    try:
        return str(_identity_of(context))
    except NoIdentity:
        return str(context.peer()).rpartition(":")[0]


def _why_not(context: Any, method: str) -> str:
    try:
        return why_not_rpc(_identity_of(context), method)
    except NoIdentity as error:
        return str(error)


def _identity_of(context: Any) -> Identity:
    """Raises NoIdentity."""
    return identity_among([name.decode(errors="replace") for name in context.auth_context().get(_NAMES, ())])
