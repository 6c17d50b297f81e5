"""Both ends of a session over simulated connections: what the edges do, without threads.

The protocol itself is `coppice.session.link`, the same as in the services.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from coppice.session.frames import Hello, Reject, RejectCode
from coppice.session.link import Accepted, Attached, ClientLink, LinkBroken, ServerLink, ServerLinks
from coppice_sim.base.network import Connection, Network
from coppice_sim.base.process import Process
from coppice_sim.base.timeline import MS
from coppice_sim.base.versions import as_said, may_say, since

HEARTBEAT_MS = 100
SUSPECT_MS = 300


class ClientHandler(Protocol):
    def link_attached(self, attached: Attached) -> None: ...

    def link_body(self, body: Any) -> None: ...

    def link_lost(self) -> None: ...

    def link_rejected(self, reject: Reject) -> None: ...


class ClientEnd:
    """Connects, reconnects after silence or a break, sends what is posted."""

    def __init__(
        self,
        process: Process,
        network: Network,
        link: ClientLink[Any],
        address: str,
        handler: ClientHandler,
        nobody_listens: Callable[[], None] | None = None,
    ) -> None:
        self.process = process
        self.link = link
        self._network = network
        self._address = address
        self._handler = handler
        self._nobody_listens = nobody_listens
        self._connection: Connection | None = None
        self._heard_ns = process.now_ns
        self._is_over = False
        self._retry_ms = 10
        self._connect()
        process.every(HEARTBEAT_MS * MS, self._beat)

    def post(self, body: Any) -> None:
        """Without effect while the link is at another attachment: that starts with a reconciliation. What the other end
        does not know is not said."""
        version = self.link.version
        if not may_say(body, version):
            return
        self.link.post(as_said(body, version))
        self._flush()

    def renew(self, key: bytes) -> None:
        """Give the session up; the next attachment is a fresh one."""
        self._lose()
        self.link.renew(key)

    def stop(self) -> None:
        self._is_over = True
        if self._connection is not None:
            self._connection.close(self)
            self._connection = None

    def on_frame(self, connection: Connection, frame: Any) -> None:
        if self._is_over:
            return
        if connection is not self._connection:
            self._old_frame(frame)
            return
        self._heard_ns = self.process.now_ns
        try:
            event = self.link.receive(frame)
        except LinkBroken:
            self._lose()
            return
        match event:
            case Reject():
                self._lose()
                self._handler.link_rejected(event)
            case Attached():
                self._retry_ms = 10
                self._handler.link_attached(event)
                self._flush()
            case bodies:
                for body in bodies:
                    _heard(self.process, body)
                    self._handler.link_body(body)

    def _old_frame(self, frame: Any) -> None:
        """What comes late from a connection before this one has no effect; without a connection nobody listens."""
        if self._connection is not None and not isinstance(frame, Reject):
            assert self.link.receive(frame) == [], "a frame of an old connection had an effect"

    def on_closed(self, connection: Connection) -> None:
        if connection is self._connection:
            self._lose()

    def _connect(self) -> None:
        if self._is_over or self._connection is not None:
            return
        hello = self.link.connect()
        self._connection = self._network.connect(self, self._network.listener(self._address))
        if self._connection is None:
            if self._nobody_listens is not None and self._network.refuses(self.process, self._address):
                self._nobody_listens()
            self._retry()
            return
        self._heard_ns = self.process.now_ns
        self._connection.to_server(hello)

    def _lose(self) -> None:
        was_attached, connection = self.link.is_attached, self._connection
        self._connection = None
        self.link.is_attached = False
        if connection is not None:
            connection.close(self)
        if was_attached:
            self._handler.link_lost()
        self._retry()

    def _retry(self) -> None:
        self._retry_ms = min(self._retry_ms * 2, 200)
        self.process.after(int(self._retry_ms * MS * (0.5 + self.process.rng.random())), self._connect)

    def _flush(self) -> None:
        if self._connection is not None:
            for frame in self.link.outgoing():
                self._connection.to_server(frame)

    def _beat(self) -> None:
        if self._connection is None or self._is_over:
            return
        if self.process.now_ns - self._heard_ns > SUSPECT_MS * MS:
            self._lose()
        elif self.link.is_attached:
            self._connection.to_server(self.link.heartbeat())


def _heard(process: Process, body: Any) -> None:
    name, known = type(body).__name__, process.speaks
    assert since(body) <= known.highest, f"{process.name}, of a build that speaks protocol {known}, hears {name}"


class ServerHandler(Protocol):
    def session_opening(self, hello: Hello) -> int | Reject: ...

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None: ...

    def session_heard(self, link: ServerLink[Any]) -> None: ...

    def session_body(self, link: ServerLink[Any], body: Any) -> None: ...


class ServerEnd:
    """All sessions that a process serves on one port. `replace` starts a new incarnation."""

    def __init__(self, process: Process, handler: ServerHandler) -> None:
        self.process = process
        self._handler = handler
        self._links: ServerLinks[Any] | None = None
        self._session_of: dict[Connection, ServerLink[Any]] = {}
        self._connection_of: dict[bytes, Connection] = {}
        process.every(HEARTBEAT_MS * MS, self._beat)

    def replace(self, links: ServerLinks[Any]) -> None:
        self._links = links
        for connection in list(self._session_of):
            self._drop(connection)

    def issued(self, incarnation: int) -> bool:
        return self._links is not None and self._links.issued(incarnation)

    def post(self, link: ServerLink[Any], body: Any) -> None:
        """What the other end does not know is not said."""
        if not may_say(body, link.version):
            return
        link.post(as_said(body, link.version))
        self._flush(link)

    def end(self, link: ServerLink[Any]) -> None:
        """Forget a session: its client attaches anew."""
        assert self._links is not None
        self._links.forget(link)
        link.is_ended = True
        connection = self._connection_of.get(link.key)
        if connection is not None and self._session_of.get(connection) is link:
            self._drop(connection)

    def on_frame(self, connection: Connection, frame: Any) -> None:
        link = self._session_of.get(connection)
        if link is None:
            self._greet(connection, frame)
            return
        try:
            bodies = link.receive(frame)
        except LinkBroken:
            self._drop(connection)
            return
        self._handler.session_heard(link)
        for body in bodies:
            if link.is_ended:
                return
            _heard(self.process, body)
            self._handler.session_body(link, body)

    def on_closed(self, connection: Connection) -> None:
        self._forget(connection)

    def _greet(self, connection: Connection, frame: Any) -> None:
        if not isinstance(frame, Hello) or not connection.is_open:
            return
        accepted = self._accept(frame)
        if isinstance(accepted, Reject):
            connection.to_client(accepted)
            self._drop(connection)
            return
        link = accepted.link
        old = self._connection_of.get(link.key)
        if old is not None:
            self._forget(old)
        self._session_of[connection] = link
        self._connection_of[link.key] = connection
        connection.to_client(accepted.welcome)
        self._handler.session_connected(link, accepted.is_new)
        self._flush(link)

    def _accept(self, hello: Hello) -> Accepted[Any] | Reject:
        if self._links is None:
            return Reject(RejectCode.NOT_READY, "starting")
        return self._links.accept(hello, self._handler.session_opening, self.process.speaks)

    def _flush(self, link: ServerLink[Any]) -> None:
        connection = self._connection_of.get(link.key)
        if connection is None or self._session_of.get(connection) is not link:
            return
        for frame in link.outgoing():
            connection.to_client(frame)

    def _drop(self, connection: Connection) -> None:
        self._forget(connection)
        connection.close(self)

    def _forget(self, connection: Connection) -> None:
        link = self._session_of.pop(connection, None)
        if link is not None and self._connection_of.get(link.key) is connection:
            del self._connection_of[link.key]

    def _beat(self) -> None:
        for connection, link in list(self._session_of.items()):
            connection.to_client(link.heartbeat())
