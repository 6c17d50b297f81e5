"""The connecting end of a session over a gRPC stream: one thread that connects, reads and reconnects.

The application talks to it through `post`, and hears from it through a `LinkHandler`, whose methods are called on the
reader's thread and must only hand over (to an inbox queue). A body is posted under the attachment that the application
believes in: what it posts after the link moved on, but before it heard of that, is dropped here, because a fresh
attachment starts with the application's reconciliation and with nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from coppice.edge.frame_codec import FrameCodec, MalformedFrame
from coppice.session.frames import KEY_BYTES, Frame, Reject
from coppice.session.link import Attached, ClientLink, LinkBroken, LinkOverflow

HEARTBEAT_S = 1.0
SUSPECT_S = 3.0
BACKOFF_FIRST_S = 0.05
BACKOFF_LAST_S = 1.0

_log = logging.getLogger(__name__)


class LinkHandler(Protocol):
    """What the application hears. Called on the link's thread."""

    def link_attached(self, attached: Attached, attachment: int) -> None: ...

    def link_body(self, body: Any, attachment: int) -> None: ...

    def link_lost(self, reason: str) -> None:
        """The connection of an attachment broke; the session may resume."""

    def link_rejected(self, reject: Reject) -> None:
        """The server refused the handshake; the link goes on trying. Told once for each reason, not at each attempt."""


class LinkClient:
    """Keeps one session alive over as many connections as it takes."""

    def __init__(
        self,
        link: ClientLink[Any],
        open_stream: Callable[[Iterator[Any]], Any],
        outgoing: FrameCodec[Any],
        incoming: FrameCodec[Any],
        handler: LinkHandler,
        name: str,
    ) -> None:
        self._link = link
        self._open_stream = open_stream
        self._encode = outgoing.encode
        self._decode = incoming.decode
        self._handler = handler
        self._name = name
        self._changed = threading.Condition()
        self._attachment = 0
        self._stopping = False
        self._heard_s = 0.0  # when the server last said something, on the monotonic clock
        self._call: Any = None
        self._refusal = ""  # why the last handshake was refused
        self._thread = threading.Thread(target=self._run, name=f"link {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the connection and end the thread. What was posted and not sent is lost."""
        with self._changed:
            self._stopping = True
            if self._call is not None:
                self._call.cancel()
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def post(self, body: Any, attachment: int) -> None:
        """Queue one body under `attachment`; without effect when the link is at another one.

        When the server was away for so long that the session is full, the session is given up: the next attachment is
        a fresh one.
        """
        with self._changed:
            if attachment != self._attachment:
                return
            try:
                self._link.post(body)
            except LinkOverflow as error:
                _log.error("%s: %s; the session is given up", self._name, error)
                self._attachment += 1
                self._link.renew(os.urandom(KEY_BYTES))
                if self._call is not None:
                    self._call.cancel()
            self._changed.notify_all()

    # ---- the connection ----

    def _run(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        while not self._stopping:
            reason, was_attached = self._connect_once()
            if self._stopping:
                return
            if was_attached:
                backoff_s = BACKOFF_FIRST_S
                self._handler.link_lost(reason)
            _log.debug("%s: connection ended: %s", self._name, reason)
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, timeout=backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_LAST_S)

    def _connect_once(self) -> tuple[str, bool]:
        """One connection from Hello to its end. Returns why it ended, and whether it had been attached."""
        with self._changed:
            hello = self._link.connect()
            self._heard_s = time.monotonic()
            if self._stopping:
                return "stopping", False
            self._call = call = self._open_stream(self._frames(hello.connection, self._encode(hello)))
        was_attached = False
        try:
            for wire in call:
                frame = self._decode(wire)
                if self._stopping or self._dispatch(frame):
                    break
                was_attached = was_attached or self._link.is_attached
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:  # by us: the writer found the server silent
                return f"heard nothing for {SUSPECT_S:.0f} s", was_attached
            return f"{error.code().name}: {error.details()}", was_attached
        except (LinkBroken, MalformedFrame) as error:
            return str(error), was_attached
        finally:
            call.cancel()
            with self._changed:
                self._link.is_attached = False
                self._changed.notify_all()
        return "closed by the server", was_attached

    def _dispatch(self, frame: Frame[Any]) -> bool:
        """Handle one frame; True ends the connection."""
        with self._changed:
            self._heard_s = time.monotonic()
            event = self._link.receive(frame)
            if isinstance(event, Attached):
                if event.fresh or self._attachment == 0:
                    self._attachment += 1
                self._changed.notify_all()
            attachment = self._attachment
        match event:
            case Reject():
                if event.message != self._refusal:
                    self._refusal = event.message
                    self._handler.link_rejected(event)
                return True
            case Attached():
                self._refusal = ""
                self._handler.link_attached(event, attachment)
            case bodies:
                for body in bodies:
                    self._handler.link_body(body, attachment)
        return False

    def _frames(self, connection: int, hello: Any) -> Iterator[Any]:
        """What is written on one connection: the handshake, then whatever is posted, then heartbeats while idle."""
        yield hello
        while True:
            with self._changed:
                frames = self._wait_frames(connection)
                if self._is_over(connection):
                    return
            for frame in frames:
                yield self._encode(frame)

    def _wait_frames(self, connection: int) -> list[Any]:
        """Data as soon as there is some, a heartbeat after HEARTBEAT_S without. Hangs up on a silent server."""
        due_s = time.monotonic() + HEARTBEAT_S
        while not self._is_over(connection):
            now_s = time.monotonic()
            if now_s - self._heard_s >= SUSPECT_S and self._call is not None:
                self._call.cancel()
                return []
            frames: list[Any] = list(self._link.outgoing())
            if frames:
                return frames
            if now_s >= due_s:
                if self._link.is_attached:
                    return [self._link.heartbeat()]
                due_s = now_s + HEARTBEAT_S
            self._changed.wait(timeout=due_s - now_s)
        return []

    def _is_over(self, connection: int) -> bool:
        return self._stopping or connection != self._link.connection
