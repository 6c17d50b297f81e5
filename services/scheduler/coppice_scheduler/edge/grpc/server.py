"""The gRPC port of a front door: what strangers may take of it, health, reflection.

    connection made --10 s--> handshake complete --> calls --1 min without any--> closed
                                                       +-- 10 min after it was made: no more calls; closed at its last

A call without a key ends after `KeylessLimits`, one with a key at its own deadline.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coppice.edge.grpc_server import SERVER_OPTIONS
from coppice.errors import UnavailableError
from coppice_scheduler.edge.base.public_tls import PublicTls
from coppice_scheduler.edge.frontend.generation_spec import MAX_BODY_BYTES
from coppice_scheduler.edge.grpc.generation import SERVICE, Generation
from coppice_scheduler.edge.grpc.health import Health
from coppice_scheduler.edge.grpc.keyless import KeylessCalls, KeylessLimits

STREAMS_MAX = 1024  # of one connection; further calls wait at the client
HEALTH = "grpc.health.v1.Health"

_OPTIONS: dict[str, int] = {
    **dict(SERVER_OPTIONS),
    # Two front doors share the port; that nobody else has it was seen to before they were started.
    "grpc.so_reuseport": 1,
    # What is a little too large is refused by name, what is larger is not read.
    "grpc.max_receive_message_length": 2 * MAX_BODY_BYTES,
    "grpc.max_concurrent_streams": STREAMS_MAX,
    "grpc.server_handshake_timeout_ms": 10_000,  # for a connection that says nothing
    # Of a client that is gone without a word, the streams end.
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """A client whose connection was told to end opens another one for its next call."""

    connections: int
    idle_s: float = 60.0
    age_s: float = 600.0
    # Behind its age, for the calls that it has: far more than an answer takes, as no stream may be cut in its middle.
    last_calls_s: float = 86_400.0

    def options(self) -> dict[str, int]:
        return {
            "grpc.max_allowed_incoming_connections": self.connections,
            "grpc.max_connection_idle_ms": round(1000 * self.idle_s),
            "grpc.max_connection_age_ms": round(1000 * self.age_s),
            "grpc.max_connection_age_grace_ms": round(1000 * self.last_calls_s),
        }


class GenerationServer:
    """Not serving until `set_ready(True)`."""

    def __init__(
        self,
        generation: Generation,
        host: str,
        port: int,
        limits: ConnectionLimits,
        tls: PublicTls | None = None,
        *,
        keyless: KeylessLimits | None = None,
    ) -> None:
        """Raises UnavailableError."""
        options = {**_OPTIONS, **limits.options()}
        keyless_calls = KeylessCalls(SERVICE, keyless or KeylessLimits())
        self._server = grpc.aio.server(options=tuple(options.items()), interceptors=(keyless_calls,))
        self._health = Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_generic_rpc_handlers((generation.handler(),))
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), self._server)
        try:
            address = f"{host}:{port}"
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, tls.grpc_credentials())
        except RuntimeError as error:
            raise UnavailableError(
                f"cannot listen on {host}:{port} for gRPC", hint="choose another --grpc-port"
            ) from error

    async def start(self) -> None:
        self.set_ready(False)
        await self._server.start()

    def set_ready(self, ready: bool) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            self._health.set(service, serving)

    def begin_to_end(self) -> None:
        """Tell every Watch that this ends, and end it."""
        self._health.end()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then end them."""
        await self._server.stop(grace_s)
