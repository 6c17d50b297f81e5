"""The gRPC port of a front door: what strangers may take of it, health, reflection."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coppice.edge.grpc_server import SERVER_OPTIONS
from coppice.errors import UnavailableError
from coppice_scheduler.edge.base.public_tls import PublicTls
from coppice_scheduler.edge.frontend.generation_spec import MAX_BODY_BYTES
from coppice_scheduler.edge.grpc.generation import SERVICE, Generation

STREAMS_MAX = 1024  # of one connection; further calls wait at the client

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


class GenerationServer:
    """Not serving until `set_ready(True)`."""

    def __init__(
        self, generation: Generation, host: str, port: int, max_connections: int, tls: PublicTls | None = None
    ) -> None:
        """Raises UnavailableError."""
        options = {**_OPTIONS, "grpc.max_allowed_incoming_connections": max_connections}
        self._server = grpc.aio.server(options=tuple(options.items()))
        self._health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._server.add_generic_rpc_handlers((generation.handler(),))
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
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
        await self.set_ready(False)
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, serving)

    async def begin_to_end(self) -> None:
        """Tell every Watch that this ends, and end it."""
        await self._health.enter_graceful_shutdown()
        self._health.end_watches()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then end them."""
        await self._server.stop(grace_s)


class _Health(health.aio.HealthServicer):  # type: ignore[misc]
    """The library's, but calls of Watch end with the server: there is no other end that they would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._watching: set[asyncio.Task[None]] = set()
        self._has_ended = False

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        if self._has_ended:
            return
        task = asyncio.current_task()
        assert task is not None
        self._watching.add(task)
        try:
            await super().Watch(request, context)
        except asyncio.CancelledError:
            if not self._has_ended:
                raise
        finally:
            self._watching.discard(task)

    def end_watches(self) -> None:
        self._has_ended = True
        for task in self._watching:
            task.cancel()
