"""The accepting end of sessions over gRPC streams.

A stream's handler thread writes; a second thread reads. The application is asked for an epoch when a new session opens
and hears bodies and signs of life through a `SessionHandler`; all of that is called on the reader's thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import grpc

from coppice.edge.frame_codec import FrameCodec, MalformedFrame
from coppice.edge.link_client import HEARTBEAT_S
from coppice.session.frames import Hello, Reject, RejectCode
from coppice.session.link import Accepted, LinkBroken, LinkOverflow, ServerLink, ServerLinks

_log = logging.getLogger(__name__)


class SessionHandler(Protocol):
    """What the application answers and hears. `epoch` names the session."""

    def session_opening(self, hello: Hello) -> int | Reject:
        """A session that is not known here: its epoch from now on, or a refusal. Must not block for long."""

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None: ...

    def session_heard(self, link: ServerLink[Any]) -> None: ...

    def session_body(self, link: ServerLink[Any], body: Any) -> None: ...


class LinkServer:
    """All sessions of one edge. `replace` starts a new incarnation; `post` and `end` may be called from any thread."""

    def __init__(
        self,
        links: ServerLinks[Any] | None,
        outgoing: FrameCodec[Any],
        incoming: FrameCodec[Any],
        handler: SessionHandler,
        not_ready: str = "the service is starting",
    ) -> None:
        self._links = links
        self._encode = outgoing.encode
        self._decode = incoming.decode
        self._handler = handler
        self._not_ready = not_ready
        self._changed = threading.Condition()
        # Two connections of one session may overlap: bodies are taken and handed over in one piece.
        self._delivering = threading.Lock()
        self._closing = False

    def replace(self, links: ServerLinks[Any] | None) -> None:
        """Forget every session: their streams end, their clients reconnect and find a new incarnation."""
        with self._changed:
            self._links = links
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def post(self, link: ServerLink[Any], body: Any) -> bool:
        """Queue one body. False: the session is full or over, and was ended."""
        with self._changed:
            try:
                link.post(body)
            except LinkOverflow:
                self._end_locked(link)
                return False
            self._changed.notify_all()
            return True

    def end(self, link: ServerLink[Any]) -> None:
        with self._changed:
            self._end_locked(link)

    def _end_locked(self, link: ServerLink[Any]) -> None:
        if self._links is not None:
            self._links.forget(link)
        link.is_ended = True
        self._changed.notify_all()

    # ---- one stream ----

    def serve(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Body of the bidirectional rpc."""
        try:
            hello = self._decode(next(requests))
        except StopIteration:
            return
        except MalformedFrame as error:
            yield self._encode(Reject(RejectCode.INVALID, str(error)))
            return
        accepted = self._accept(hello)
        if isinstance(accepted, Reject):
            yield self._encode(accepted)
            return
        link, links = accepted.link, self._links
        connection = accepted.welcome.connection
        yield self._encode(accepted.welcome)
        self._handler.session_connected(link, accepted.is_new)
        reader = threading.Thread(
            target=self._read, args=(link, requests, context), name=f"session {link.name}", daemon=True
        )
        reader.start()
        yield from self._write(link, links, connection, context)

    def _accept(self, hello: Any) -> Accepted[Any] | Reject:
        if not isinstance(hello, Hello):
            return Reject(RejectCode.INVALID, "a session starts with Hello")
        with self._changed:
            links = self._links
            if links is None or self._closing:
                return Reject(RejectCode.NOT_READY, self._not_ready)
            is_known = links.knows(hello.key)
        # The application may post while it opens a session, so it is asked without our lock.
        epoch = 0 if is_known else self._handler.session_opening(hello)
        with self._changed:
            if links is not self._links:
                return Reject(RejectCode.NOT_READY, self._not_ready)
            accepted = links.accept(hello, lambda _: epoch)
            self._changed.notify_all()
            return accepted

    def _write(
        self, link: ServerLink[Any], links: Any, connection: int, context: grpc.ServicerContext
    ) -> Iterator[Any]:
        while context.is_active():
            with self._changed:
                frames: list[Any] = [] if self._is_over(link, links, connection) else list(link.outgoing())
                if not frames and not self._is_over(link, links, connection):
                    self._changed.wait(timeout=HEARTBEAT_S)
                    if not self._is_over(link, links, connection):
                        frames = list(link.outgoing()) or [link.heartbeat()]
                if self._is_over(link, links, connection):
                    return
            for frame in frames:
                yield self._encode(frame)

    def _read(self, link: ServerLink[Any], requests: Iterator[Any], context: grpc.ServicerContext) -> None:
        try:
            for wire in requests:
                frame = self._decode(wire)
                with self._delivering:
                    with self._changed:
                        bodies = link.receive(frame)
                    self._handler.session_heard(link)
                    for body in bodies:
                        self._handler.session_body(link, body)
        except grpc.RpcError:
            _log.debug("session %s: connection closed", link.name)
        except (LinkBroken, MalformedFrame) as error:
            _log.warning("session %s: closing the connection: %s", link.name, error)
        context.cancel()
        with self._changed:
            self._changed.notify_all()

    def _is_over(self, link: ServerLink[Any], links: Any, connection: int) -> bool:
        return self._closing or links is not self._links or connection != link.connection or link.is_ended
