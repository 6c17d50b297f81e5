"""`python -m coppice_scheduler.edge.door CONNECTION LISTENER`: one front door, started by the planner's process.

    REST and gRPC  <-->  FrontDoor (text)  <-->  DoorEngine (tokens)  <-- socket -->  planner

Both arguments are inherited file descriptors: the socket to the planner and the one that REST listens on. All else is
in the first frame. The planner's process says when to end; a front door that loses it ends its streams and itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from coppice.edge.grpc_server import SERVER_OPTIONS
from coppice.errors import EXIT_FAILURE, EXIT_OK, CoppiceError, UnavailableError
from coppice.telemetry import configure_logging, configure_tracing
from coppice.tenants import TenantDirectory
from coppice_rpc.v1 import scheduler_pb2_grpc
from coppice_scheduler.edge.checkpoint_text import load_checkpoint_text
from coppice_scheduler.edge.door_engine import DoorEngine
from coppice_scheduler.edge.door_messages import CannotServe, FrameReader, Serving, Start, to_frame
from coppice_scheduler.edge.file_limit import connections_within_limit
from coppice_scheduler.edge.frontdoor import FrontDoor
from coppice_scheduler.edge.generation_grpc import GenerationServicer
from coppice_scheduler.edge.generation_spec import MAX_BODY_BYTES
from coppice_scheduler.edge.http_server import HttpLimits, uvicorn_config
from coppice_scheduler.edge.metrics import FrontDoorMetrics, merged_registry
from coppice_scheduler.edge.openai_http import create_app
from coppice_scheduler.edge.planner_metrics import PlannerCollector
from coppice_scheduler.edge.settings import ServiceSettings

_log = logging.getLogger("coppice.scheduler")
SERVICE = "coppice_rpc.v1.Generation"
CLOSE_GRACE_S = 2.0  # for answers that are complete to reach their clients
CUT_GRACE_S = 0.5  # for what is left after that to hear that it was cut off
ORPHAN_S = CLOSE_GRACE_S + 1.0  # a front door without a planner lives no longer
_GRPC_OPTIONS = {
    **dict(SERVER_OPTIONS),
    # Two front doors share the port; that nobody else has it was seen to before they were started.
    "grpc.so_reuseport": 1,
    # Strangers write here. What is a little too large is refused by name, what is larger is not read.
    "grpc.max_receive_message_length": 2 * MAX_BODY_BYTES,
}


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop_listening(self) -> None:
        for server in self.servers if self.started else ():
            server.close()

    def cut_off(self) -> None:
        """End all connections, whatever their clients have not read."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _Health(health.aio.HealthServicer):  # type: ignore[misc]
    """The library's, but calls of Watch end with the server: there is no other end that they would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._watching: set[asyncio.Task[None]] = set()
        self._has_ended = False

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
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


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the planner's process, which tells us
    parent = os.getppid()
    connection, listener = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    threading.Thread(target=_die_with_planner, args=(connection.fileno(),), name="tether", daemon=True).start()
    start = _read_start(connection)
    if start is None:
        return EXIT_FAILURE
    settings = ServiceSettings.model_validate_json(start.settings)
    configure_logging(settings.log_level)
    tracing = configure_tracing("coppice-scheduler", settings.otlp_endpoint)
    try:
        asyncio.run(_serve(start, settings, connection, listener))
    except CoppiceError as error:
        connection.setblocking(True)
        connection.sendall(to_frame(CannotServe(error.exit_code, error.what, error.hint)))
        return error.exit_code
    finally:
        tracing()
        if os.getppid() != parent:
            shutil.rmtree(start.metrics_dir, ignore_errors=True)  # it was killed, and nobody else will
    return EXIT_OK


def _die_with_planner(connection_fd: int) -> None:
    """Whatever the loop does meanwhile."""
    poller = select.poll()
    poller.register(connection_fd, 0)  # only that the other end is closed
    poller.poll()
    time.sleep(ORPHAN_S)
    os._exit(EXIT_FAILURE)


def _read_start(connection: socket.socket) -> Start | None:
    frames = FrameReader()
    while data := connection.recv(65536):
        for message in frames.feed(data):
            assert isinstance(message, Start)
            return message
    return None


async def _serve(start: Start, settings: ServiceSettings, connection: socket.socket, listener: socket.socket) -> None:
    checkpoint = load_checkpoint_text(settings.model)
    tenants = TenantDirectory.load(settings.tenants) if settings.tenants else TenantDirectory.single_default()
    engine = DoorEngine(start.door, start.model)
    metrics = FrontDoorMetrics(CollectorRegistry(), start.model.id)
    frontdoor = FrontDoor(engine, checkpoint, tenants, metrics, max_retain_ms=settings.max_retain_ms)
    # Metrics name tenants and tell how busy each is, which is no tenant's to know.
    is_public = settings.metrics_port is None and not tenants.needs_key
    registry = merged_registry(start.metrics_dir, PlannerCollector(engine.stats, start.model.id)) if is_public else None
    limits = HttpLimits(max_connections=connections_within_limit())
    rest = _Server(uvicorn_config(create_app(frontdoor, registry), settings.host, settings.port, limits))
    grpc_server, health_servicer = await _start_grpc(settings, frontdoor)
    await asyncio.get_running_loop().create_connection(lambda: engine, sock=connection)
    rest_task = asyncio.create_task(rest.serve(sockets=[listener]))
    engine.send(Serving())
    await _until_the_end(engine, health_servicer)
    rest.stop_listening()
    await health_servicer.enter_graceful_shutdown()
    engine.end_streams("the scheduler shut down before this request was complete; send it again")
    health_servicer.end_watches()
    rest.should_exit = True
    ended = asyncio.gather(rest_task, grpc_server.stop(CLOSE_GRACE_S))
    if not (await asyncio.wait({ended}, timeout=CLOSE_GRACE_S))[0]:
        rest.cut_off()
        await asyncio.wait({ended}, timeout=CUT_GRACE_S)
    if ended.done():
        ended.result()


async def _until_the_end(engine: DoorEngine, health_servicer: _Health) -> None:
    """Tell gRPC health how things are until the planner says stop, or nothing any more."""
    while not (engine.stop_wanted or engine.planner_is_lost):
        serving = health_pb2.HealthCheckResponse.SERVING if engine.ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await health_servicer.set(service, serving)
        await engine.changed.wait()
        engine.changed.clear()


async def _start_grpc(settings: ServiceSettings, frontdoor: FrontDoor) -> tuple[grpc.aio.Server, _Health]:
    server = grpc.aio.server(options=tuple(_GRPC_OPTIONS.items()))
    health_servicer = _Health()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    scheduler_pb2_grpc.add_GenerationServicer_to_server(GenerationServicer(frontdoor), server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        server.add_insecure_port(f"{settings.host}:{settings.grpc_port}")
    except RuntimeError as error:
        raise UnavailableError(
            f"cannot listen on {settings.host}:{settings.grpc_port} for gRPC", hint="choose another --grpc-port"
        ) from error
    for service in ("", SERVICE):
        await health_servicer.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    return server, health_servicer


if __name__ == "__main__":
    sys.exit(main())
