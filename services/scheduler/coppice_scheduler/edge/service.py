"""The scheduler's process: it owns the planner, its front doors and the ports, and ends in order.

    planner, sessions' threads                    here
    front doors (REST, gRPC, text): processes    started and watched by the main thread, `door_processes.py`

SIGTERM -> not ready, no new requests -> those at work end (up to drain_s) -> front doors end -> exit 0
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from coppice.addresses import Address, is_loopback
from coppice.audit_log import AuditLog
from coppice.edge.signal_event import SignalEvent
from coppice.errors import CoppiceError, UnavailableError, UsageError
from coppice.garbage import shorten_pauses
from coppice.telemetry.metrics_server import serve_metrics
from coppice.tenants.agreement import TenantsAgreement
from coppice.tenants.directory import DEFAULT_TENANT_ID
from coppice.tenants.watch import TenantsWatch
from coppice.tls.credentials import Credentials
from coppice.tls.identity import Role
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.settings import INSTANCE_BYTES, SchedulerSettings, TenantLimits
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.file_limit import BACKLOG, raise_file_limit
from coppice_scheduler.edge.base.metrics import merged_registry
from coppice_scheduler.edge.base.metrics_folder import metrics_folder
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_scheduler.edge.ipc.door_messages import Start
from coppice_scheduler.edge.planner.door_processes import DoorProcesses
from coppice_scheduler.edge.planner.doors import Doors
from coppice_scheduler.edge.planner.metrics import PlannerCollector
from coppice_scheduler.edge.planner.tenant_reload import TenantReload
from coppice_scheduler.edge.planner.tenant_settings import tenant_settings

_log = logging.getLogger("coppice.scheduler")
LOOK_S = 0.25  # how often front doors are looked after when nothing happens
DRAIN_LOOK_S = 0.02
DOOR_END_S = 4.5  # from Stop to SIGKILL


@dataclass(frozen=True, slots=True)
class _Limits:
    max_context: int
    vocab_size: int


def serve(settings: ServiceSettings) -> None:
    """Run until a signal. Raises CoppiceError."""
    if not settings.tenants and not is_loopback(settings.host):
        raise UsageError(
            f"--host {settings.host} can be reached from other machines, and without a tenants file everybody who "
            "reaches it may use it",
            hint="give --tenants FILE, or listen on 127.0.0.1",
        )
    settings.check_listening()
    tls = settings.credentials(Role.SCHEDULER)
    settings.public_tls()  # what is wrong there is told before anything is started
    limits = _model_limits(Path(settings.model))
    audit = AuditLog("scheduler", settings.audit_log)
    watch = TenantsWatch(settings.tenants, audit) if settings.tenants else None
    model = ModelInfo(
        id=settings.model_name or Path(settings.model).resolve().name,
        max_context=limits.max_context,
        created=int(time.time()),
        vocab_size=limits.vocab_size,
    )
    raise_file_limit()
    stopping, changed = SignalEvent(), SignalEvent()
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        changed.set()

    def on_signal(*_: object) -> None:
        stopping.set()
        changed.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    core = SchedulerCore(_core_settings(settings, limits, watch))
    with _listening(settings) as listener, _grpc_port(settings) as grpc_port, metrics_folder() as folder:
        ports = {"port": listener.getsockname()[1], "grpc_port": grpc_port}
        _log.info("REST on %s:%d, gRPC on port %d", settings.host, *ports.values())
        content = watch.content if watch is not None else b""
        start = Start(0, settings.model_copy(update=ports).model_dump_json(), model, folder, content)
        doors = Doors(core, settings.cache, f"scheduler-{os.getpid()}", failed, tls=tls)
        registry = merged_registry(folder, PlannerCollector(lambda: doors.planner.stats, model.id))
        if watch is not None:
            registry.register(watch)
        agreement = TenantsAgreement(watch, lambda: doors.planner.cache_tenants_version)
        registry.register(agreement)
        with _metrics_listener(settings, registry, doors, agreement, tls):
            shorten_pauses()
            doors.planner.start()
            processes = DoorProcesses(doors, start, listener, settings.front_doors, changed)
            reload = TenantReload(watch, doors, processes) if watch is not None else None
            if reload is not None:
                signal.signal(signal.SIGHUP, lambda *_: reload.want())
            try:
                while not (stopping.is_set() or failures):
                    changed.wait(LOOK_S)
                    changed.clear()
                    processes.tend()
                    if reload is not None:
                        reload.tend()
                    agreement.tend(time.monotonic())
                if not failures:
                    _drain(doors, settings.drain_s)
                    processes.stop(DOOR_END_S)
            finally:
                processes.close(DOOR_END_S)
                doors.planner.stop()
    if failures:
        raise CoppiceError(f"the planner failed: {failures[0]}", hint="see the log above; start the scheduler again")


def _drain(doors: Doors, drain_s: float) -> None:
    doors.drain()
    deadline_s = time.monotonic() + drain_s
    while doors.num_requests and time.monotonic() < deadline_s:
        time.sleep(DRAIN_LOOK_S)


@contextlib.contextmanager
def _metrics_listener(
    settings: ServiceSettings,
    registry: CollectorRegistry,
    doors: Doors,
    agreement: TenantsAgreement,
    tls: Credentials | None,
) -> Iterator[None]:
    """/metrics on a port of its own, where one is wanted."""
    if settings.metrics_port is None:
        yield
        return
    host, port = settings.metrics_host, settings.metrics_port
    server = serve_metrics(
        host,
        port,
        registry,
        lambda: doors.planner.problems,
        notes=lambda: agreement.notes,
        flag="--metrics-port",
        tls=tls,
    )
    _log.info("metrics on %s:%d", settings.metrics_host, server.port)
    try:
        yield
    finally:
        server.close()


def _listening(settings: ServiceSettings) -> socket.socket:
    """What all front doors accept REST connections from. While one is started again, new ones wait in its backlog."""
    try:
        listener = socket.create_server((settings.host, settings.port), backlog=BACKLOG)
        # Accepted sockets inherit it. asyncio would set it only on sockets that name their protocol.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}", hint="choose another --port"
        ) from error


@contextlib.contextmanager
def _grpc_port(settings: ServiceSettings) -> Iterator[int]:
    """A port that front doors can share, and nobody else has. It is held while they come and go."""
    address = (settings.host, settings.grpc_port)
    family = Address(*address).family
    held = socket.socket(family)
    try:
        socket.create_server(address, family=family).close()  # refuses to share
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
    except OSError as error:
        held.close()
        raise UnavailableError(
            f"cannot listen on {settings.host}:{settings.grpc_port} for gRPC: {error.strerror or error}",
            hint="choose another --grpc-port",
        ) from error
    with held:
        yield held.getsockname()[1]


def _model_limits(folder: Path) -> _Limits:
    """Context and vocabulary from config.json."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise UsageError(f"{folder} is no directory", hint="--model names a checkpoint folder")
    try:
        config = json.loads(path.read_text("utf-8"))
        return _Limits(_max_context(config), int(config["vocab_size"]))
    except FileNotFoundError as error:
        raise UsageError(f"{path} is missing", hint="--model names a checkpoint folder") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not usable: {error!r}", hint="it needs max_position_embeddings and vocab_size"
        ) from error


def _max_context(config: dict[str, Any]) -> int:
    """As workers have it: positions that yarn stretches lead further than those that the model was trained on."""
    trained = int(config["max_position_embeddings"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "yarn" or rope.get("factor") is None:
        return trained
    return max(trained, int(rope.get("original_max_position_embeddings", trained) * rope["factor"]))


def _core_settings(settings: ServiceSettings, limits: _Limits, watch: TenantsWatch | None) -> SchedulerSettings:
    unlimited = TenantLimits(max_concurrency=settings.max_queued + settings.max_running, max_queued=settings.max_queued)
    try:
        core = SchedulerSettings(
            instance=os.urandom(INSTANCE_BYTES),
            max_step_tokens=settings.max_step_tokens,
            max_running=settings.max_running,
            max_chunk_tokens=settings.max_chunk_tokens,
            contested_prefill_tokens=settings.contested_prefill_tokens,
            max_overtake_ms=settings.max_overtake_ms,
            match_window=settings.match_window,
            max_queued=settings.max_queued,
            max_queued_tokens=settings.max_queued_tokens,
            queue_timeout_ms=settings.queue_timeout_ms,
            max_steps_in_flight=settings.max_steps_in_flight,
            max_decode_steps=settings.max_decode_steps,
            extend_more_blocks=settings.extend_more_blocks,
            decode_burst_ms=settings.decode_burst_ms,
            single_flight_wait_ms=settings.single_flight_wait_ms,
            retain_priority=settings.retain_priority,
            max_context=limits.max_context,
            default_limits=unlimited,
            tenants={DEFAULT_TENANT_ID: unlimited},
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return core.with_tenants(tenant_settings(watch.directory)) if watch is not None else core
