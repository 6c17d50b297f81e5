"""The accepting end of sessions.

Each connection has a thread that reads; whoever posts writes. The application is asked for an epoch when a new session
opens and hears bodies and signs of life through a `SessionHandler`; all of that is called without the lock of this
class, so that the application may hold its own lock while it calls `post` and `end`, and never the other way round.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

from coppice.edge.codec import Edge, MalformedFrame
from coppice.edge.link_client import HEARTBEAT_S
from coppice.edge.told_once import ToldOnce
from coppice.edge.wire import MessageTooLong, Wire, WireClosed
from coppice.session.frames import Hello, Reject, RejectCode
from coppice.session.link import Accepted, LinkBroken, LinkOverflow, ServerLink, ServerLinks
from coppice.tls.rights import why_not_session

_log = logging.getLogger(__name__)
HELLO_S = 5.0  # every connection keeps a thread, so one that does not introduce itself is ended
SILENT_S = 15.0  # clients say something every second: this one's machine or network is gone


class SessionHandler(Protocol):
    """What the application answers and hears. `link.epoch` names the session.

    Everything may be late: a call about a link can come after the application ended that link, and of two overlapping
    connections of a new session the second may be reported first.
    """

    def session_opening(self, hello: Hello) -> int | Reject:
        """A session that is not known here: its epoch from now on, or a refusal. Must not block for long."""

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None:
        """A connection of the session was accepted. Called before its Welcome is written."""

    def session_heard(self, link: ServerLink[Any]) -> None:
        """A sign of life on the newest connection that brought no body; a body is one as well."""

    def session_body(self, link: ServerLink[Any], body: Any) -> None:
        """One body, once and in order."""


class SessionRefused(Exception):
    """Raised by a handler: the client broke the application's rules; its session ends with this text."""


@dataclass(eq=False, slots=True)
class _Stream:
    """One accepted connection."""

    link: ServerLink[Any]
    links: ServerLinks[Any]
    connection: int
    wire: Wire
    is_welcomed: bool = False
    heartbeat_due_s: float = 0.0  # on the monotonic clock


class LinkServer:
    """All sessions of one kind. `replace` starts a new incarnation; `post` and `end` may be called from any thread."""

    def __init__(
        self,
        links: ServerLinks[Any] | None,
        edge: Edge,
        handler: SessionHandler,
        not_ready: str = "the service is starting",
        hello_s: float = HELLO_S,
    ) -> None:
        self._links = links
        self._hello_s = hello_s
        self.kind = edge.kind
        self._speaks = edge.speaks
        self._bounds = {"takes": edge.client_bytes_max, "sends": edge.server_bytes_max}
        self._encode = edge.from_server.encode
        self._decode = edge.from_client.decode
        self._handler = handler
        self._not_ready = not_ready
        self._lock = threading.Lock()
        self._streams: dict[ServerLink[Any], _Stream] = {}  # the newest connection of each session
        self._farewells: dict[ServerLink[Any], Reject] = {}
        # Two connections of one session may overlap: bodies are taken and handed over in one piece.
        self._delivering = threading.Lock()
        self._closing = False
        self._told = ToldOnce()

    def replace(self, links: ServerLinks[Any] | None) -> None:
        """Forget every session: their streams end, their clients reconnect and find a new incarnation."""
        with self._lock:
            self._links = links
            self._wake_all_locked()

    def issued(self, incarnation: int) -> bool:
        """Whether a session of the present incarnation has or had this number in its Welcome."""
        with self._lock:
            return self._links is not None and self._links.issued(incarnation)

    @property
    def is_connected(self) -> bool:
        """Whether some session has a connection."""
        with self._lock:
            return bool(self._streams)

    def close(self) -> None:
        """End every stream and refuse new ones."""
        with self._lock:
            self._closing = True
            self._wake_all_locked()

    def post(self, link: ServerLink[Any], body: Any) -> bool:
        """Say one body, unless the client speaks an older protocol that does not have it. False: the session is full or
        over, and was ended."""
        with self._lock:
            if link.is_ended:
                return False
            if link.version < body.SINCE:
                return True
            try:
                link.post(body)
            except LinkOverflow:
                self._end_locked(link)
                return False
            stream = self._streams.get(link)
            if stream is not None and stream.is_welcomed:
                self._write_outgoing_locked(stream)
            return not link.is_ended

    def end(self, link: ServerLink[Any], farewell: Reject | None = None) -> None:
        """Forget a session and end its stream; the client reads `farewell` last."""
        with self._lock:
            if farewell is not None and link in self._streams:
                self._farewells[link] = farewell
            self._end_locked(link)

    def _end_locked(self, link: ServerLink[Any]) -> None:
        if self._links is not None:
            self._links.forget(link)
        link.is_ended = True
        self._wake_locked(link)

    def _wake_locked(self, link: ServerLink[Any]) -> None:
        stream = self._streams.get(link)
        if stream is not None:
            stream.wire.wake()

    def _wake_all_locked(self) -> None:
        for stream in self._streams.values():
            stream.wire.wake()

    def _write_outgoing_locked(self, stream: _Stream) -> None:
        frames = [] if self._is_over(stream) else stream.link.outgoing()
        if frames:
            try:
                stream.wire.write(*map(self._encode, frames))
            except MessageTooLong as error:  # resumed, the session would bring the same once more
                _log.error("session %s: %s; the session ends", stream.link.name, error)
                self._end_locked(stream.link)
            stream.heartbeat_due_s = time.monotonic() + HEARTBEAT_S

    # ---- one stream ----

    def serve(self, wire: Wire) -> None:
        """One connection, until it is over. Raises WireClosed, WireSilent when it ends before its Hello."""
        try:
            hello = self._decode(wire.next(self._hello_s))
        except MalformedFrame as error:
            wire.write(self._encode(Reject(RejectCode.INVALID, str(error))))
            return
        opened = self._open(hello, wire)
        if isinstance(opened, Reject):
            wire.write(self._encode(opened))
            return
        accepted, stream = opened
        wire.trust(**self._bounds)
        threading.current_thread().name = f"session {stream.link.name}"
        try:
            self._handler.session_connected(stream.link, accepted.is_new)
            with self._lock:
                wire.write(self._encode(accepted.welcome))
                stream.is_welcomed, stream.heartbeat_due_s = True, time.monotonic() + HEARTBEAT_S
                self._write_outgoing_locked(stream)
            if accepted.is_new and stream.link.version < self._speaks.highest:
                _log.info("session %s: protocol %d, as it is of an older build", stream.link.name, stream.link.version)
            self._read(stream)
        finally:
            self._close_stream(stream)

    def _open(self, hello: Any, wire: Wire) -> tuple[Accepted[Any], _Stream] | Reject:
        if not isinstance(hello, Hello):
            return Reject(RejectCode.INVALID, "a session starts with Hello")
        if wire.peer is not None and (why_not := why_not_session(wire.peer, self.kind, hello.name)):
            if self._told.is_new(why_not):
                _log.warning("a session was refused: %s", why_not)
            return Reject(RejectCode.INVALID, why_not)
        while True:
            with self._lock:
                links = self._links
                if links is None or self._closing:
                    return Reject(RejectCode.NOT_READY, self._not_ready)
                # What this refuses anyway, and what is known already, must not open a session in the application.
                if links.knows(hello.key) or links.refusal(hello, self._speaks) is not None:
                    return self._accept_locked(links, hello, 0, wire)
            # The application may post while it opens a session, so it is asked without our lock.
            epoch = self._handler.session_opening(hello)
            with self._lock:
                if links is self._links and not self._closing:
                    return self._accept_locked(links, hello, epoch, wire)

    def _accept_locked(
        self, links: ServerLinks[Any], hello: Hello, epoch: int | Reject, wire: Wire
    ) -> tuple[Accepted[Any], _Stream] | Reject:
        accepted = links.accept(hello, lambda _: epoch, self._speaks)
        if isinstance(accepted, Reject):
            if accepted.code is RejectCode.VERSION and self._told.is_new(accepted.message):
                _log.error("a session was refused: %s", accepted.message)
            return accepted
        self._wake_locked(accepted.link)  # the reader of the connection before
        stream = _Stream(accepted.link, links, accepted.welcome.connection, wire)
        self._streams[accepted.link] = stream
        return accepted, stream

    def _close_stream(self, stream: _Stream) -> None:
        with self._lock:
            if self._streams.get(stream.link) is stream:
                del self._streams[stream.link]
                farewell = self._farewells.pop(stream.link, None)
                if farewell is not None:
                    stream.wire.write(self._encode(farewell))

    def _read(self, stream: _Stream) -> None:
        name = stream.link.name
        try:
            self._converse(stream)
        except WireClosed as closed:
            _log.debug("session %s: connection closed: %s", name, closed)
        except LinkBroken as error:
            _log.warning("session %s: closing the connection: %s", name, error)
        except (SessionRefused, MalformedFrame) as refused:  # resumed, the session would bring the same once more
            _log.warning("session %s: refused: %s", name, refused)
            self.end(stream.link, Reject(RejectCode.INVALID, str(refused)))
        except Exception:
            # A bug of ours. Its message counts as received and will not come again, so the session cannot go on.
            _log.exception("session %s: a message could not be handled; its session ends", name)
            self.end(stream.link)

    def _converse(self, stream: _Stream) -> None:
        while (wait_s := self._wait_s(stream)) is not None:
            messages = stream.wire.receive(wait_s)
            if not messages and time.monotonic() - stream.wire.heard_s >= SILENT_S:
                _log.warning("session %s: heard nothing for %.0f s; closing the connection", stream.link.name, SILENT_S)
                return
            for message in messages:
                frame = self._decode(message)
                with self._delivering:
                    if not self._deliver(stream, frame):
                        return

    def _wait_s(self, stream: _Stream) -> float | None:
        """Time until something must be said; says it when that is now. None: the connection is over."""
        with self._lock:
            if self._is_over(stream):
                return None
            now_s = time.monotonic()
            if now_s >= stream.heartbeat_due_s:
                stream.heartbeat_due_s = now_s + HEARTBEAT_S
                stream.wire.write(self._encode(stream.link.heartbeat()))
            return stream.heartbeat_due_s - now_s

    def _deliver(self, stream: _Stream, frame: Any) -> bool:
        """False: a newer connection or incarnation took over, what is still buffered here must not count."""
        with self._lock:
            if self._is_over(stream):
                return False
            bodies = stream.link.receive(frame)
        for body in bodies:
            self._handler.session_body(stream.link, body)
        if not bodies:
            self._handler.session_heard(stream.link)
        return True

    def _is_over(self, stream: _Stream) -> bool:
        return (
            self._closing
            or stream.links is not self._links
            or stream.connection != stream.link.connection
            or stream.link.is_ended
        )
