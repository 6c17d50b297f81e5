"""`python -m coppice_scheduler.edge.planner CONNECTION LISTENER [PEERS]`: the planner, started by the scheduler.

    front doors  <-- socket -->  Doors  <->  Planner  <-- sessions -->  cache service, workers
    the parent   <-- socket -->  what is to be planned with, how things are

The arguments are inherited file descriptors: the socket to the parent, the one where front doors come, and the one
where those of other schedulers do, if they may. All else is in the first frame. A planner that loses its parent ends;
one that fails ends, too, and the parent starts another.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from coppice.compiled import kind_of
from coppice.edge.acceptor import Acceptor
from coppice.errors import EXIT_FAILURE, EXIT_OK, CoppiceError
from coppice.garbage import shorten_pauses
from coppice.processes.leaving import leave
from coppice.telemetry.logs import configure_logging
from coppice.tenants.directory import TenantDirectory
from coppice.tls.credentials import Credentials
from coppice.tls.identity import Role
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.edge.base.file_limit import raise_file_limit
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_scheduler.edge.ipc.door_messages import DOORS_MAX, CannotServe, Stop, Tenants
from coppice_scheduler.edge.ipc.message_channel import MessageChannel
from coppice_scheduler.edge.ipc.planner_messages import (
    FROM_PLANNER,
    TO_PLANNER,
    CutOff,
    Drain,
    FromPlanner,
    Plan,
    TenantsRefused,
    ToPlanner,
)
from coppice_scheduler.edge.planner.core_settings import core_settings
from coppice_scheduler.edge.planner.door_channel import open_door
from coppice_scheduler.edge.planner.doors import Doors
from coppice_scheduler.edge.planner.peers.channel import PeerGate, PeerListener
from coppice_scheduler.edge.planner.tenant_settings import tenant_settings

_log = logging.getLogger("coppice.scheduler")


class _PlannerService:
    """Begins with the first word of the parent."""

    def __init__(self, parent: socket.socket, listener: socket.socket, peers: socket.socket | None = None) -> None:
        self._listener = listener
        self._peers = peers
        self._settings: ServiceSettings | None = None
        self._doors: Doors | None = None
        self._ended = threading.Event()
        self._parent: MessageChannel[FromPlanner, ToPlanner] = MessageChannel(
            parent, FROM_PLANNER, TO_PLANNER, self._told, self._orphaned, peer="the scheduler's process"
        )

    def run(self) -> int:
        self._parent.start()
        self._ended.wait()
        if self._doors is not None:
            self._doors.planner.stop()
        return EXIT_OK

    # ---- on the thread of the parent's channel ----

    def _told(self, message: ToPlanner) -> None:
        try:
            self._take(message)
        except Exception as error:
            _log.exception("what the scheduler's process said could not be done")
            _failed(error)

    def _take(self, message: ToPlanner) -> None:
        if isinstance(message, Plan):
            self._begin(message)
        elif isinstance(message, Stop):
            self._ended.set()
        elif self._doors is not None:
            if isinstance(message, Tenants):
                self._doors.set_tenants(tenant_settings(self._directory(message.content)), message.content)
            elif isinstance(message, TenantsRefused):
                self._doors.tenants_refused(message.is_refused)
            elif isinstance(message, Drain):
                self._doors.drain()

    def _begin(self, plan: Plan) -> None:
        settings = self._settings = ServiceSettings.model_validate_json(plan.settings)
        configure_logging(settings.log_level, settings.log_format)
        raise_file_limit()
        _log.info("core: %s", kind_of("coppice_scheduler"))
        try:
            directory = self._directory(plan.tenants) if settings.tenants else None
            tls = settings.credentials(Role.SCHEDULER)
            self._doors = self._made(plan, settings, directory, tls)
        except CoppiceError as error:
            self._parent.send(CannotServe(error.exit_code, error.what, error.hint))
            self._ended.set()
            return
        doors = self._doors
        if directory is not None:  # front doors may know an older file, or a newer one than those of other planners
            doors.set_tenants(tenant_settings(directory), plan.tenants)
        doors.tenants_refused(plan.tenants_refused)
        if plan.is_draining:
            doors.drain()
        shorten_pauses()
        doors.planner.start()
        Acceptor(self._listener, self._welcome, most=DOORS_MAX, what="front doors").start()
        if self._peers is not None:
            PeerListener(self._peers, doors, PeerGate(plan.model, tls)).start()

    def _made(
        self, plan: Plan, settings: ServiceSettings, directory: TenantDirectory | None, tls: Credentials | None
    ) -> Doors:
        core = SchedulerCore(core_settings(settings, plan.model.max_context, directory))
        return Doors(
            core,
            settings.cache,
            f"scheduler-{os.getpid()}",
            _failed,
            tls=tls,
            succeeds=plan.succeeds,
            told=self._parent.send,
            instance=plan.instance,
        )

    def _directory(self, content: bytes) -> TenantDirectory:
        assert self._settings is not None
        assert self._settings.tenants is not None
        return TenantDirectory.parse(Path(self._settings.tenants), content)

    def _orphaned(self) -> None:
        """Nobody would start another, and nobody hears what becomes of the requests."""
        if not self._ended.is_set():
            os._exit(EXIT_FAILURE)

    # ---- front doors ----

    def _welcome(self, connection: socket.socket, peer: object, over: Callable[[], None]) -> None:
        assert self._doors is not None
        open_door(self._doors, connection, lambda number: self._parent.send(CutOff(number)), over)


def _failed(error: BaseException) -> None:
    """A core that failed half-way is good for nothing. It has been logged."""
    logging.shutdown()
    os._exit(EXIT_FAILURE)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the parent, which tells us; blocked until now
    return _PlannerService(*(socket.socket(fileno=int(word)) for word in sys.argv[1:4])).run()


if __name__ == "__main__":
    leave(main())
