"""One way to start a gRPC server: limits, keepalive, health with Watch, reflection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coppice.addresses import PortInUse
from coppice.audit_log import AuditLog
from coppice.edge.grpc_calls.bounds import Bounds, CallBounds, CallThreads
from coppice.edge.grpc_calls.health import Health
from coppice.edge.grpc_tls import RoleCheck, server_credentials
from coppice.tls.credentials import Credentials

ANSWER_BYTES_MAX = 64 * 1024 * 1024  # a tree that is told
REQUEST_BYTES_MAX = 8 * 1024 * 1024  # a prompt of 2^20 tokens, or several of fewer
# Every open call keeps a thread. One party that fills both bounds leaves 64 of them.
CALLS = Bounds(threads=512, waits=256, party_calls=192)
HEALTH_CALLS = Bounds(threads=64, waits=32, party_calls=64)  # apart: health answers while others are busy
# Further calls wait at the client. gRPC refuses new ones with REFUSED_STREAM, too, while those that have ended are not
# freed here yet: so it is not flooded by streams that are reset at once, and a client that says many in one instant
# tries some again (docs/OPERATING.md has the policy).
CONNECTION_STREAMS_MAX = 32
CONNECTIONS_MAX = 256
_MINUTE_MS = 60_000

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    ("grpc.max_send_message_length", ANSWER_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.max_send_message_length", ANSWER_BYTES_MAX),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # two servers on one port are an error, not a lottery
)

# What one peer may take of a server with threads.
_CONNECTION_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_concurrent_streams", CONNECTION_STREAMS_MAX),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
    ("grpc.server_handshake_timeout_ms", 10_000),  # for a connection that says nothing
    ("grpc.max_connection_idle_ms", 10 * _MINUTE_MS),
    # A stream that stays, such as `Watch`, ends some time after that, and its client comes back where it was.
    ("grpc.max_connection_age_ms", 60 * _MINUTE_MS),
    ("grpc.max_connection_age_grace_ms", 10 * _MINUTE_MS),
)


class GrpcServer:
    """A threaded gRPC server with health and reflection. Not serving until `set_ready(True)`. With `tls`, callers
    need a certificate, and each call a role; `audit` hears of those without it."""

    def __init__(
        self,
        address: str,
        services: Sequence[str],
        register: Callable[[grpc.Server], None] | None,
        name: str,
        *,
        tls: Credentials | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        calls, health_calls = CallThreads(CALLS, f"grpc {name}"), CallThreads(HEALTH_CALLS, f"health {name}")
        self._pools = calls.pool, health_calls.pool
        checks: list[grpc.ServerInterceptor] = [] if tls is None else [RoleCheck(audit)]
        checks.append(CallBounds(calls, health_calls))
        options = (*SERVER_OPTIONS, *_CONNECTION_OPTIONS)
        self._server = grpc.server(calls.pool, options=options, interceptors=checks)
        self._services = ("", *services)
        self._health = Health(health_calls)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.set_ready(False)
        if register is not None:
            register(self._server)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, server_credentials(tls))
        except RuntimeError as error:
            raise PortInUse(f"cannot listen on {address}: is another process using that port?") from error

    def add(self, register: Callable[[grpc.Server], None]) -> None:
        """Add servicers that need to know the port; before `start`."""
        register(self._server)

    def start(self) -> None:
        self._server.start()

    def set_ready(self, ready: bool) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            self._health.set(service, serving)

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then end them."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait()
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
