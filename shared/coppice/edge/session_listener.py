"""The port on which a service accepts sessions: one thread that accepts, one for each connection."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence

from coppice.addresses import Address, PortInUse
from coppice.edge.link_server import LinkServer
from coppice.edge.wire import Wire, WireClosed, WireSilent, introduction, kinds_served

_log = logging.getLogger(__name__)
CONNECTIONS_MAX = 128  # each keeps one thread
INTRODUCTION_S = 5.0


class SessionListener:
    """Listens from the start on; answers from `start` on. Raises PortInUse."""

    def __init__(self, address: Address) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._socket = socket.create_server((address.host, address.port), family=family)
        except OSError as error:
            raise PortInUse(f"cannot listen on {address} for sessions: {error.strerror or error}") from error
        self.port: int = self._socket.getsockname()[1]
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._servers: dict[str, LinkServer] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._accept, name="sessions", daemon=True)

    def start(self, servers: Sequence[LinkServer]) -> None:
        self._servers = {server.kind: server for server in servers}
        self._thread.start()

    def close(self) -> None:
        """Accept nobody any more. The sessions that run are their servers' to end."""
        self._closing = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        except OSError:
            pass
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closing:
            self._slots.acquire()
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                self._slots.release()
                if not self._closing:
                    _log.warning("a connection could not be accepted: %s", error)
                continue
            threading.Thread(target=self._serve, args=(connection, peer[0]), name="session", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        wire = Wire(connection)
        try:
            wanted = kinds_served(wire.next(INTRODUCTION_S))
            wire.write(introduction(*self._servers))
            for kind in wanted[:1]:
                if kind in self._servers:
                    self._servers[kind].serve(wire)
        except (WireClosed, WireSilent) as error:
            _log.debug("a connection from %s said nothing that is understood here: %s", peer, error)
        except Exception:
            _log.exception("a session of %s could not be served", peer)
        finally:
            wire.finish()
            self._slots.release()
