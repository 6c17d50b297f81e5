"""The accepting end of sessions over gRPC streams.

A stream's handler thread writes; a second thread reads. The application is asked for an epoch when a new session opens
and hears bodies and signs of life through a `SessionHandler`; all of that is called without the lock of this class, so
that the application may hold its own lock while it calls `post` and `end`, and never the other way round.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from coppice.edge.frame_codec import FrameCodec, MalformedFrame
from coppice.edge.link_client import HEARTBEAT_S
from coppice.session.frames import Hello, Reject, RejectCode
from coppice.session.link import Accepted, LinkBroken, LinkOverflow, ServerLink, ServerLinks

_log = logging.getLogger(__name__)
HELLO_S = 5.0  # every open stream keeps a thread of the server, so one that does not introduce itself is ended


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
    """One accepted connection, and how to wake its writer."""

    link: ServerLink[Any]
    links: ServerLinks[Any]
    connection: int
    changed: threading.Condition


class LinkServer:
    """All sessions of one edge. `replace` starts a new incarnation; `post` and `end` may be called from any thread."""

    def __init__(
        self,
        links: ServerLinks[Any] | None,
        outgoing: FrameCodec[Any],
        incoming: FrameCodec[Any],
        handler: SessionHandler,
        not_ready: str = "the service is starting",
        hello_s: float = HELLO_S,
    ) -> None:
        self._links = links
        self._hello_s = hello_s
        self._encode = outgoing.encode
        self._decode = incoming.decode
        self._handler = handler
        self._not_ready = not_ready
        self._lock = threading.Lock()
        self._streams: dict[ServerLink[Any], _Stream] = {}  # the newest connection of each session
        self._farewells: dict[ServerLink[Any], Reject] = {}
        # Two connections of one session may overlap: bodies are taken and handed over in one piece.
        self._delivering = threading.Lock()
        self._closing = False

    def replace(self, links: ServerLinks[Any] | None) -> None:
        """Forget every session: their streams end, their clients reconnect and find a new incarnation."""
        with self._lock:
            self._links = links
            self._wake_all_locked()

    def issued(self, incarnation: int) -> bool:
        """Whether a session of the present incarnation has or had this number in its Welcome."""
        with self._lock:
            return self._links is not None and self._links.issued(incarnation)

    def close(self) -> None:
        """End every stream and refuse new ones."""
        with self._lock:
            self._closing = True
            self._wake_all_locked()

    def post(self, link: ServerLink[Any], body: Any) -> bool:
        """Queue one body. False: the session is full or over, and was ended."""
        with self._lock:
            if link.is_ended:
                return False
            try:
                link.post(body)
            except LinkOverflow:
                self._end_locked(link)
                return False
            self._wake_locked(link)
            return True

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
            stream.changed.notify_all()

    def _wake_all_locked(self) -> None:
        for stream in self._streams.values():
            stream.changed.notify_all()

    # ---- one stream ----

    def serve(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Body of the bidirectional rpc."""
        try:
            hello = self._decode(self._first(requests, context))
        except (StopIteration, grpc.RpcError):
            return
        except MalformedFrame as error:
            yield self._encode(Reject(RejectCode.INVALID, str(error)))
            return
        opened = self._open(hello)
        if isinstance(opened, Reject):
            yield self._encode(opened)
            return
        accepted, stream = opened
        try:
            self._handler.session_connected(stream.link, accepted.is_new)
            reader = threading.Thread(
                target=self._read, args=(stream, requests, context), name=f"session {stream.link.name}", daemon=True
            )
            reader.start()
            yield self._encode(accepted.welcome)
            yield from self._write(stream, context)
        finally:
            self._close_stream(stream)

    def _first(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
        """The first message. Raises grpc.RpcError when none comes in time: only the end of the call wakes the wait."""
        timer = threading.Timer(self._hello_s, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            return next(requests)
        finally:
            timer.cancel()

    def _open(self, hello: Any) -> tuple[Accepted[Any], _Stream] | Reject:
        if not isinstance(hello, Hello):
            return Reject(RejectCode.INVALID, "a session starts with Hello")
        while True:
            with self._lock:
                links = self._links
                if links is None or self._closing:
                    return Reject(RejectCode.NOT_READY, self._not_ready)
                # What this refuses anyway, and what is known already, must not open a session in the application.
                if links.knows(hello.key) or links.refusal(hello) is not None:
                    return self._accept_locked(links, hello, 0)
            # The application may post while it opens a session, so it is asked without our lock.
            epoch = self._handler.session_opening(hello)
            with self._lock:
                if links is self._links and not self._closing:
                    return self._accept_locked(links, hello, epoch)

    def _accept_locked(
        self, links: ServerLinks[Any], hello: Hello, epoch: int | Reject
    ) -> tuple[Accepted[Any], _Stream] | Reject:
        accepted = links.accept(hello, lambda _: epoch)
        if isinstance(accepted, Reject):
            return accepted
        self._wake_locked(accepted.link)  # the writer of the connection before
        stream = _Stream(accepted.link, links, accepted.welcome.connection, threading.Condition(self._lock))
        self._streams[accepted.link] = stream
        return accepted, stream

    def _close_stream(self, stream: _Stream) -> None:
        with self._lock:
            if self._streams.get(stream.link) is stream:
                del self._streams[stream.link]
                self._farewells.pop(stream.link, None)

    def _write(self, stream: _Stream, context: grpc.ServicerContext) -> Iterator[Any]:
        context.add_callback(lambda: self._wake(stream))
        while context.is_active():
            with self._lock:
                frames = self._wait_frames_locked(stream, context)
                if self._is_over(stream):
                    farewell = self._farewells.pop(stream.link, None)
                    break
            for frame in frames:
                yield self._encode(frame)
        else:
            return
        if farewell is not None:
            yield self._encode(farewell)

    def _wait_frames_locked(self, stream: _Stream, context: grpc.ServicerContext) -> list[Any]:
        """Data as soon as there is some, a heartbeat after HEARTBEAT_S without."""
        due_s = time.monotonic() + HEARTBEAT_S
        while not self._is_over(stream) and context.is_active():
            frames: list[Any] = list(stream.link.outgoing())
            if frames:
                return frames
            left_s = due_s - time.monotonic()
            if left_s <= 0:
                return [stream.link.heartbeat()]
            stream.changed.wait(timeout=left_s)
        return []

    def _wake(self, stream: _Stream) -> None:
        with self._lock:
            stream.changed.notify_all()

    def _read(self, stream: _Stream, requests: Iterator[Any], context: grpc.ServicerContext) -> None:
        name = stream.link.name
        try:
            for wire in requests:
                frame = self._decode(wire)
                with self._delivering:
                    if not self._deliver(stream, frame):
                        break
        except grpc.RpcError:
            _log.debug("session %s: connection closed", name)
        except (LinkBroken, MalformedFrame) as error:
            _log.warning("session %s: closing the connection: %s", name, error)
        except SessionRefused as refused:
            _log.warning("session %s: refused: %s", name, refused)
            self.end(stream.link, Reject(RejectCode.INVALID, str(refused)))
            return  # the writer ends the stream, after the farewell
        except Exception:
            # A bug of ours. Its message counts as received and will not come again, so the session cannot go on.
            _log.exception("session %s: a message could not be handled; its session ends", name)
            self.end(stream.link)
        context.cancel()

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
