"""The port on which a service accepts sessions: one thread that accepts, one for each connection."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from typing import Any

from coppice.addresses import Address, PortInUse
from coppice.edge.link_server import LinkServer
from coppice.edge.wire import Wire, WireClosed, WireSilent, introduction, kinds_served

_log = logging.getLogger(__name__)
CONNECTIONS_MAX = 1024  # each keeps one thread and three descriptors
INTRODUCTION_S = 5.0
PAUSE_S = 0.5


class SessionListener:
    """Listens from the start on; answers from `start` on. Raises PortInUse."""

    def __init__(self, address: Address) -> None:
        try:
            self._socket = socket.create_server((address.host, address.port), family=address.family)
        except OSError as error:
            raise PortInUse(f"cannot listen on {address} for sessions: {error.strerror or error}") from error
        self.port: int = self._socket.getsockname()[1]
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._servers: dict[str, LinkServer] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="sessions", daemon=True)

    def start(self, servers: Sequence[LinkServer]) -> None:
        self._servers = {server.kind: server for server in servers}
        self._thread.start()

    def close(self) -> None:
        """Accept nobody any more. The sessions that run are their servers' to end."""
        self._closing.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        except OSError:
            pass
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._socket.close()

    def _accept(self) -> None:
        while self._take_slot():
            try:
                self._begin(*self._socket.accept())
            except (
                OSError,
                RuntimeError,
            ) as error:  # out of descriptors or of threads: those that end give theirs back
                self._slots.release()
                if not self._closing.is_set():
                    _log.warning("a connection could not be accepted: %s", error)
                self._closing.wait(PAUSE_S)

    def _take_slot(self) -> bool:
        """False: it is closing."""
        if not self._slots.acquire(blocking=False):
            _log.warning("%d connections are open here, the most there may be; others wait", CONNECTIONS_MAX)
            while not self._slots.acquire(timeout=PAUSE_S):
                if self._closing.is_set():
                    return False
        if self._closing.is_set():
            self._slots.release()
            return False
        return True

    def _begin(self, connection: socket.socket, peer: tuple[Any, ...]) -> None:
        try:
            wire = Wire(connection)
            threading.Thread(target=self._serve, args=(wire, peer[0]), name="session", daemon=True).start()
        except BaseException:
            connection.close()
            raise

    def _serve(self, wire: Wire, peer: str) -> None:
        try:
            wanted = kinds_served(wire.next(INTRODUCTION_S))
            wire.write(introduction(*self._servers))
            server = self._servers.get(wanted[0]) if wanted else None
            if server is not None:
                server.serve(wire)
        except (WireClosed, WireSilent) as error:
            _log.debug("a connection from %s said nothing that is understood here: %s", peer, error)
        except Exception:
            _log.exception("a session of %s could not be served", peer)
        finally:
            wire.finish()
            self._slots.release()
