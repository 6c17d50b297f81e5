"""`python -m coppice_scheduler.edge.door CONNECTION LISTENER`: one front door, started by the scheduler's process.

    REST and gRPC  <-->  FrontDoor (text)  <-->  DoorEngine (tokens)  <-- socket -->  planner

Both arguments are inherited file descriptors: the socket to the parent and the one that REST listens on. All else is in
the first frame. The parent says when to end; a front door that loses it ends its streams and itself. Planners come
and go.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from coppice.addresses import parse_address
from coppice.compiled import kind_of
from coppice.edge.wire import Splitter, packed
from coppice.errors import EXIT_FAILURE, EXIT_OK, CoppiceError, UsageError
from coppice.garbage import shorten_pauses
from coppice.processes.leaving import leave
from coppice.request_log.writer import RecordWriter
from coppice.telemetry.build_info import BuildInfo
from coppice.telemetry.logs import configure_logging
from coppice.telemetry.traces import Tracing, configure_tracing
from coppice.tenants.directory import TenantDirectory
from coppice.tls.identity import Role
from coppice_scheduler.edge.base.file_limit import connections_within_limit
from coppice_scheduler.edge.base.metrics import FrontDoorMetrics, merged_registry
from coppice_scheduler.edge.base.metrics_folder import recent_records
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.grpc.generation import Generation
from coppice_scheduler.edge.grpc.server import ConnectionLimits, GenerationServer
from coppice_scheduler.edge.http.field_table import UnknownFields
from coppice_scheduler.edge.http_server import HttpLimits, HttpServer
from coppice_scheduler.edge.ipc.door_engine import DoorEngine
from coppice_scheduler.edge.ipc.door_messages import (
    DOOR_TO_PARENT,
    MESSAGE_BYTES_MAX,
    PARENT_TO_DOOR,
    CannotServe,
    Serving,
    Start,
)
from coppice_scheduler.edge.ipc.links import ParentLink, PlannerLink
from coppice_scheduler.edge.planner.metrics import PlannerCollector
from coppice_scheduler.edge.request_log.budgets import REFRESH_S, Budgets
from coppice_scheduler.edge.request_log.call_metrics import GRPC_APIS, CallMetrics, CountedLog
from coppice_scheduler.edge.rest_app import apis_of, create_app
from coppice_scheduler.edge.text.checkpoint_text import load_checkpoint_text

_log = logging.getLogger("coppice.scheduler")
SERVICE = "coppice-scheduler"  # in traces
RECENT_BYTES_MAX = 2 * 1024 * 1024  # of a file of records that nobody asked for, of which there are two
CLOSE_GRACE_S = 2.0  # for answers that are complete to reach their clients
CUT_GRACE_S = 0.5  # for what is left after that to hear that it was cut off
ORPHAN_S = CLOSE_GRACE_S + 1.0  # a front door without its parent lives no longer


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the parent, which tells us; blocked until now
    parent = os.getppid()
    connection, listener = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    threading.Thread(target=_die_with_parent, args=(connection.fileno(),), name="tether", daemon=True).start()
    start = _read_start(connection)
    if start is None:
        return EXIT_FAILURE
    settings = ServiceSettings.model_validate_json(start.settings)
    configure_logging(settings.log_level, settings.log_format)
    tracing = _tracing(settings)
    try:
        asyncio.run(_serve(start, settings, connection, listener))
    except CoppiceError as error:
        connection.setblocking(True)
        connection.sendall(packed(DOOR_TO_PARENT.encode(CannotServe(error.exit_code, error.what, error.hint))))
        return error.exit_code
    finally:
        tracing()
        if os.getppid() != parent:
            shutil.rmtree(start.metrics_dir, ignore_errors=True)  # it was killed, and nobody else will
    return EXIT_OK


def _tracing(settings: ServiceSettings) -> Tracing:
    """Files of TLS that are wrong now cost spans: a front door that is started again serves all the same."""
    endpoint = settings.otlp_endpoint
    if endpoint is None or not endpoint.startswith("https://"):
        return configure_tracing(SERVICE, endpoint)
    try:
        return configure_tracing(SERVICE, endpoint, tls=settings.credentials(Role.SCHEDULER))
    except UsageError as error:
        _log.error("no spans are sent: %s", error)
        return configure_tracing(SERVICE, None)


def _die_with_parent(connection_fd: int) -> None:
    """Whatever the loop does meanwhile."""
    poller = select.poll()
    poller.register(connection_fd, 0)  # only that the other end is closed
    poller.poll()
    time.sleep(ORPHAN_S)
    os._exit(EXIT_FAILURE)


def _read_start(connection: socket.socket) -> Start | None:
    """None: the parent ended first."""
    incoming = Splitter(MESSAGE_BYTES_MAX)
    while data := connection.recv(65536):
        incoming.feed(data)
        for message in incoming.split():
            start = PARENT_TO_DOOR.decode(message)
            assert isinstance(start, Start)
            return start
    return None


async def _serve(start: Start, settings: ServiceSettings, connection: socket.socket, listener: socket.socket) -> None:
    checkpoint = load_checkpoint_text(settings.model)
    tenants = _directory(settings, start.tenants)
    loop = asyncio.get_running_loop()
    parent = ParentLink()

    async def reach(path: str, link: PlannerLink) -> object:
        return await loop.create_unix_connection(lambda: link, path)

    reaches = [partial(reach, path) for path in start.planners]
    engine = DoorEngine(start.door, start.model, reaches, parent, start.tenants)
    counted = CollectorRegistry()  # whoever is scraped reads the files that stand behind it
    metrics = FrontDoorMetrics(counted, start.model.id)
    budgets = Budgets(settings.request_log)
    frontdoor = FrontDoor(
        engine,
        checkpoint,
        tenants,
        metrics,
        max_retain_ms=settings.max_retain_ms,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        budgets=budgets,
        trace_slow_ms=settings.trace_slow_ms,
    )
    engine.moved = frontdoor.moved
    engine.tenants_changed = lambda content: frontdoor.set_tenants(_directory(settings, content))
    # Metrics name tenants and tell how busy each is, which is no tenant's to know.
    is_public = not tenants.needs_key
    gauges = (PlannerCollector(engine.stats, start.model.id), BuildInfo("scheduler", kind_of("coppice_scheduler")))
    registry = merged_registry(start.metrics_dir, gauges) if is_public else None
    connections = connections_within_limit()
    limits = HttpLimits(max_connections=connections.rest)
    tls = settings.public_tls()
    app = create_app(frontdoor, registry, unknown_fields=UnknownFields(settings.unknown_fields))
    calls = CallMetrics(counted, start.model.id, (*apis_of(app), *GRPC_APIS))
    log = CountedLog(_request_log(start, settings), calls)
    rest = HttpServer(app, settings.host, settings.port, limits, tls, settings.cors_origins, log, calls.turned_away)
    grpc_limits = ConnectionLimits(connections.grpc)
    grpc_server = GenerationServer(Generation(frontdoor, log=log), settings.host, settings.grpc_port, grpc_limits, tls)
    await grpc_server.start()
    await loop.create_connection(lambda: parent, sock=connection)
    planners = asyncio.create_task(engine.keep_planners())
    peers = asyncio.create_task(_keep_peers(engine, settings, start.instance))
    refreshing = asyncio.create_task(_keep_budgets(budgets))
    frontdoor.warm_up()
    shorten_pauses()
    rest_task = asyncio.create_task(rest.serve(sockets=[listener]))
    parent.send(Serving())
    await _until_the_end(parent, engine, grpc_server)
    rest.stop_listening()
    engine.end_streams("the scheduler shut down before this request was complete; send it again")
    grpc_server.begin_to_end()
    rest.should_exit = True
    ended = asyncio.gather(rest_task, grpc_server.stop(CLOSE_GRACE_S))
    if not (await asyncio.wait({ended}, timeout=CLOSE_GRACE_S))[0]:
        rest.cut_off()
        await asyncio.wait({ended}, timeout=CUT_GRACE_S)
    for task in (planners, peers, refreshing):
        task.cancel()
    if ended.done():
        ended.result()


async def _keep_budgets(budgets: Budgets) -> None:
    while True:
        await asyncio.to_thread(budgets.refresh, datetime.now(UTC))
        await asyncio.sleep(REFRESH_S)


def _request_log(start: Start, settings: ServiceSettings) -> RecordWriter:
    """Without a folder of the operator's the newest records are kept in that of the metrics, which is in memory."""
    name = f"{start.instance.hex()[:8]}-{start.door}"
    if settings.request_log:
        return RecordWriter(settings.request_log, name)
    return RecordWriter(recent_records(start.metrics_dir), name, bytes_max=RECENT_BYTES_MAX, files_max=2)


async def _keep_peers(engine: DoorEngine, settings: ServiceSettings, instance: bytes) -> None:
    """Files of TLS that are wrong now cost the planners of other schedulers: those of this one serve all the same."""
    if not settings.planner_peers:
        return
    try:
        tls = settings.credentials(Role.SCHEDULER)
    except UsageError as error:
        _log.error("no planner of another scheduler is used: %s", error)
        return
    await engine.keep_peers([parse_address(text) for text in settings.planner_peers], tls, instance)


def _directory(settings: ServiceSettings, content: bytes) -> TenantDirectory:
    """What the parent read: a front door that is started while the file is wrong serves with what counts."""
    return (
        TenantDirectory.parse(Path(settings.tenants), content) if settings.tenants else TenantDirectory.single_default()
    )


async def _until_the_end(parent: ParentLink, engine: DoorEngine, grpc_server: GenerationServer) -> None:
    """Tell gRPC health how things are until the parent says stop, or is gone."""
    while not (parent.stop_wanted or parent.is_lost):
        grpc_server.set_ready(engine.ready)
        await engine.changed.wait()
        engine.changed.clear()


if __name__ == "__main__":
    leave(main())
