"""The scheduler's process: it owns the ports, and starts, watches and ends the processes that do the work.

    planners: 1 to 16                               they plan, `edge/planner`; another is started when one dies
    front doors (REST, gRPC, text): 1 to 64         `edge/door.py`; they hold what their streams have sent

SIGTERM -> not ready, no new requests -> those at work end (up to drain_s) -> front doors end -> exit 0
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coppice.addresses import Address, is_loopback
from coppice.audit_log import AuditLog
from coppice.compiled import kind_of
from coppice.edge.signal_event import SignalEvent
from coppice.errors import UnavailableError, UsageError
from coppice.garbage import shorten_pauses
from coppice.telemetry.build_info import BuildInfo
from coppice.telemetry.metrics_server import serve_metrics
from coppice.tenants.agreement import TenantsAgreement
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.watch import TenantsWatch
from coppice.tls.credentials import Credentials
from coppice.tls.identity import Role
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.file_limit import BACKLOG, raise_file_limit
from coppice_scheduler.edge.base.metrics import merged_registry
from coppice_scheduler.edge.base.metrics_folder import metrics_folder, recent_records
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_scheduler.edge.ipc.door_messages import Start
from coppice_scheduler.edge.ipc.planner_messages import Plan
from coppice_scheduler.edge.planner.metrics import PlannerCollector
from coppice_scheduler.edge.processes.claims import Claims
from coppice_scheduler.edge.processes.door_processes import DoorProcesses
from coppice_scheduler.edge.processes.planner_processes import PlannerProcesses
from coppice_scheduler.edge.processes.tenant_reload import TenantReload
from coppice_scheduler.edge.request_log.exemplars import WithExemplars
from coppice_scheduler.edge.request_log.pages import RequestPages
from coppice_scheduler.edge.request_log.tenants_page import TenantsPage

_log = logging.getLogger("coppice.scheduler")
LOOK_S = 0.25  # how often front doors are looked after when nothing happens
DRAIN_LOOK_S = 0.02
DOOR_END_S = 4.5  # from Stop to SIGKILL
PLANNER_END_S = 2.0
_INSTANCE_BYTES = 8


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
    _check_request_log(settings.request_log)
    audit = AuditLog("scheduler", settings.audit_log)
    watch = TenantsWatch(settings.tenants, audit) if settings.tenants else None
    if watch is not None and settings.request_log is None:
        _refuse_budgets(Path(watch.path), watch.content)
    model = ModelInfo(
        id=settings.model_name or Path(settings.model).resolve().name,
        max_context=limits.max_context,
        created=int(time.time()),
        vocab_size=limits.vocab_size,
    )
    raise_file_limit()
    with _listening(settings) as listener, _grpc_port(settings) as grpc_port, metrics_folder() as folder:
        ports = {"port": listener.getsockname()[1], "grpc_port": grpc_port}
        _log.info("REST on %s:%d, gRPC on port %d", settings.host, *ports.values())
        content = watch.content if watch is not None else b""
        told = settings.model_copy(update=ports).model_dump_json()
        places = tuple(f"{folder}/planner-{number}" for number in range(settings.planners))
        with contextlib.ExitStack() as sockets:
            planner_sockets = [
                [sockets.enter_context(_planner_socket(path)), *_peer_sockets(sockets, settings, place)]
                for place, path in enumerate(places)
            ]
            instance = os.urandom(_INSTANCE_BYTES)
            start = Start(0, told, model, folder, places, content, instance)
            plan = Plan(told, model, instance, content)
            _Service(settings, watch, tls).run(plan, start, listener, planner_sockets)


def _refuse_budgets(path: Path, content: bytes) -> None:
    """Raises UsageError for what cannot be held without records."""
    having = [tenant.id for tenant in TenantDirectory.parse(path, content).tenants if tenant.has_budget]
    if having:
        raise UsageError(
            f"{path}: tenant {having[0]!r} has a budget of tokens per month, and nothing is recorded that would count",
            hint="give --request-log FOLDER",
        )


def _check_request_log(folder: str | None) -> None:
    """Raises UsageError where no record could be written."""
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--request-log {folder}: {error.strerror}", hint="give a folder to write to") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--request-log {folder} cannot be written to", hint="give a folder to write to")


class _Service:
    """The processes of a scheduler, from their start to their end. Belongs to the main thread."""

    def __init__(self, settings: ServiceSettings, watch: TenantsWatch | None, tls: Credentials | None) -> None:
        self._settings = settings
        self._watch = watch
        self._tls = tls
        self._claims = Claims()
        self._stopping, self._changed = SignalEvent(), SignalEvent()
        self._cut_off: queue.SimpleQueue[int] = queue.SimpleQueue()  # front doors of whom the planner takes no more
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._stopping.set()
        self._changed.set()

    def run(
        self, plan: Plan, start: Start, listener: socket.socket, planner_sockets: Sequence[Sequence[socket.socket]]
    ) -> None:
        """Until a signal. Raises CoppiceError."""
        planners = PlannerProcesses(
            plan,
            planner_sockets,
            self._changed,
            self._cut_off.put,
            others_serve=bool(self._settings.planner_peers),
        )
        try:
            doors = DoorProcesses(self._claims, start, listener, self._settings.front_doors, self._changed)
            try:
                with self._metrics(planners, start) as agreement:
                    self._watch_over(planners, doors, agreement)
                    self._drain(planners, doors)
                    doors.stop(DOOR_END_S)
            finally:
                doors.close(DOOR_END_S)
            planners.stop(PLANNER_END_S)
        finally:
            planners.close()

    def _watch_over(self, planners: PlannerProcesses, doors: DoorProcesses, agreement: TenantsAgreement) -> None:
        """Until a signal."""
        shorten_pauses()
        reload = None
        if self._watch is not None:
            reload = TenantReload(self._watch, planners, doors, self._claims)
            signal.signal(signal.SIGHUP, lambda *_: reload.want())
        while not self._stopping.is_set():
            self._changed.wait(LOOK_S)
            self._changed.clear()
            self._tend(planners, doors)
            if reload is not None:
                reload.tend()
            agreement.tend(time.monotonic())
            self._claims.expire()

    def _tend(self, planners: PlannerProcesses, doors: DoorProcesses) -> None:
        planners.tend()
        while not self._cut_off.empty():
            doors.cut_off(self._cut_off.get())
        doors.tend()

    def _drain(self, planners: PlannerProcesses, doors: DoorProcesses) -> None:
        planners.drain()
        began_s = time.monotonic()
        deadline_s = began_s + self._settings.drain_s

        def is_at_rest() -> bool:
            return planners.is_at_rest and (not self._settings.planner_peers or doors.have_none_away(began_s))

        while not is_at_rest() and time.monotonic() < deadline_s:
            self._changed.wait(DRAIN_LOOK_S)
            self._changed.clear()
            self._tend(planners, doors)

    @contextlib.contextmanager
    def _metrics(self, planners: PlannerProcesses, start: Start) -> Iterator[TenantsAgreement]:
        """/metrics on a port of its own, where one is wanted."""
        gauges = (
            PlannerCollector(lambda: planners.stats, start.model.id),
            BuildInfo("scheduler", kind_of("coppice_scheduler")),
        )
        registry = merged_registry(start.metrics_dir, gauges)
        if self._watch is not None:
            registry.register(self._watch)
        agreement = TenantsAgreement(self._watch, lambda: planners.cache_tenants_version)
        registry.register(agreement)
        settings = self._settings
        if settings.metrics_port is None:
            yield agreement
            return
        records = settings.request_log or recent_records(start.metrics_dir)
        requests = RequestPages(records)
        tenants = TenantsPage(self._directory, lambda: planners.stats, settings.request_log)
        server = serve_metrics(
            settings.metrics_host,
            settings.metrics_port,
            registry,
            lambda: planners.problems,
            notes=lambda: agreement.notes,
            exemplars=WithExemplars(registry, records) if settings.otlp_endpoint else None,
            pages=lambda path, query: requests(path, query) or tenants(path, query),
            origins=settings.console_origins,
            flag="--metrics-port",
            tls=self._tls,
        )
        _log.info("metrics on %s:%d", settings.metrics_host, server.port)
        try:
            yield agreement
        finally:
            server.close()

    def _directory(self) -> TenantDirectory:
        """That counts now."""
        return TenantDirectory.single_default() if self._watch is None else self._watch.directory


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
def _planner_socket(path: str) -> Iterator[socket.socket]:
    """Where front doors find a planner. It listens here, so that they wait there while none is."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(BACKLOG)
        yield listener


def _peer_sockets(sockets: contextlib.ExitStack, settings: ServiceSettings, place: int) -> Iterator[socket.socket]:
    """Where front doors of other schedulers find a planner, if they may. Raises UnavailableError."""
    if settings.planner_port is None:
        return
    address = Address(settings.planner_host, settings.planner_port and settings.planner_port + place)
    try:
        listener = socket.create_server((address.host, address.port), family=address.family, backlog=BACKLOG)
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {address} for planners: {error.strerror or error}",
            hint="choose another --planner-port",
        ) from error
    sockets.callback(listener.close)
    told = Address(address.host, listener.getsockname()[1])
    _log.info("front doors of other schedulers reach planner %d on %s", place, told)
    yield listener


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
