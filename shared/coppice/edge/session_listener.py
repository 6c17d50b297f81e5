"""The address on which a service accepts sessions: one thread that accepts, one for each connection."""

from __future__ import annotations

import logging
import resource
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from coppice.addresses import SessionAddress, UnixAddress
from coppice.edge import session_socket
from coppice.edge.link_server import LinkServer
from coppice.edge.told_once import ToldOnce
from coppice.edge.wire import Wire, WireClosed, WireSilent, WireUntrusted, introduction, kinds_served
from coppice.tls.credentials import Credentials

_log = logging.getLogger(__name__)
CONNECTIONS_MAX = 1024  # each keeps one thread and three descriptors
INTRODUCTION_S = 5.0
PAUSE_S = 0.5


def allow_open_files() -> int:
    """Raise this process's limit of open files as far as it goes without privileges. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


class SessionListener:
    """Listens from the start on; answers from `start` on. With `tls`, over TCP to those alone who show a certificate of
    its CA. Raises PortInUse.

    `address`: with the port that a port of 0 has become.
    """

    def __init__(self, address: SessionAddress, tls: Credentials | None = None) -> None:
        self._socket = session_socket.listen(address)
        if not isinstance(address, UnixAddress):
            address = replace(address, port=self._socket.getsockname()[1])
        self.address = address
        self._tls = tls
        self._told = ToldOnce()
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._servers: dict[str, LinkServer] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="sessions", daemon=True)

    def start(self, servers: Sequence[LinkServer]) -> None:
        self._servers = {server.kind: server for server in servers}
        self._thread.start()

    def close(self) -> None:
        """Accept nobody any more. The sessions that run are their servers' to end."""
        if isinstance(self.address, UnixAddress) and not self._closing.is_set():
            with suppress(OSError):  # first: while it listens nobody else takes the path, so the file is its own
                Path(self.address.path).unlink()
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

    def _begin(self, connection: socket.socket, peer: Any) -> None:
        who = peer[0] if isinstance(peer, tuple) else "this machine"
        try:
            wire = Wire(connection)
            threading.Thread(target=self._serve, args=(wire, who), name="session", daemon=True).start()
        except BaseException:
            connection.close()
            raise

    def _serve(self, wire: Wire, peer: str) -> None:
        try:
            if self._tls is not None and not wire.is_local:
                wire.start_tls(self._tls.channel(is_server=True), INTRODUCTION_S)
            wanted = kinds_served(wire.next(INTRODUCTION_S))
            wire.write(introduction(*self._servers))
            server = self._servers.get(wanted[0]) if wanted else None
            if server is not None:
                server.serve(wire)
        except WireUntrusted as error:
            if self._told.is_new(untrusted := f"{peer}: {error}"):
                _log.warning("a connection was refused, from %s", untrusted)
        except (WireClosed, WireSilent) as error:
            _log.debug("a connection from %s said nothing that is understood here: %s", peer, error)
        except Exception:
            _log.exception("a session of %s could not be served", peer)
        finally:
            wire.finish()
            self._slots.release()
