"""The address on which a service accepts sessions: a thread for each connection."""

from __future__ import annotations

import logging
import resource
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from coppice.addresses import SessionAddress, UnixAddress
from coppice.edge import session_socket
from coppice.edge.acceptor import Acceptor
from coppice.edge.link_server import LinkServer
from coppice.edge.told_once import ToldOnce
from coppice.edge.wire import Wire, WireClosed, WireSilent, WireUntrusted, introduction, kinds_served
from coppice.tls.credentials import Credentials

_log = logging.getLogger(__name__)
CONNECTIONS_MAX = 1024  # each keeps one thread and three descriptors
INTRODUCTION_S = 5.0


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
        listener = session_socket.listen(address)
        if not isinstance(address, UnixAddress):
            address = replace(address, port=listener.getsockname()[1])
        self.address = address
        self._tls = tls
        self._told = ToldOnce()
        self._servers: dict[str, LinkServer] = {}
        self._acceptor = Acceptor(listener, self._begin, most=CONNECTIONS_MAX, what="services")

    def start(self, servers: Sequence[LinkServer]) -> None:
        self._servers = {server.kind: server for server in servers}
        self._acceptor.start()

    def close(self) -> None:
        """Accept nobody any more. The sessions that run are their servers' to end."""
        if isinstance(self.address, UnixAddress) and not self._acceptor.is_closed:
            with suppress(OSError):  # first: while it listens nobody else takes the path, so the file is its own
                Path(self.address.path).unlink()
        self._acceptor.close()

    def _begin(self, connection: socket.socket, peer: Any, over: Callable[[], None]) -> None:
        who = peer[0] if isinstance(peer, tuple) else "this machine"
        threading.Thread(target=self._serve, args=(Wire(connection), who, over), name="session", daemon=True).start()

    def _serve(self, wire: Wire, peer: str, over: Callable[[], None]) -> None:
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
            over()
