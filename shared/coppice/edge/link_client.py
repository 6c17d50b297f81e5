"""The connecting end of a session: one thread that connects, reads and reconnects.

The application talks to it through `post`, which writes to the connection at once, and hears from it through a
`LinkHandler`, whose methods are called on the reader's thread and must be quick or hand over. A body is posted under
the attachment that the application believes in: what it posts after the link moved on, but before it heard of that,
is dropped here, because a fresh attachment starts with the application's reconciliation and with nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any, Protocol

from coppice.addresses import parse_address
from coppice.edge.frame_codec import Edge, MalformedFrame
from coppice.edge.wire import (
    MESSAGE_BYTES_MAX,
    Wire,
    WireClosed,
    WireGarbled,
    WireSilent,
    connect,
    introduction,
    kinds_served,
)
from coppice.session.frames import KEY_BYTES, Frame, Reject
from coppice.session.link import Attached, ClientLink, LinkBroken, LinkOverflow

HEARTBEAT_S = 1.0
SUSPECT_S = 3.0
BACKOFF_FIRST_S = 0.05
BACKOFF_LAST_S = 1.0

_log = logging.getLogger(__name__)


class WrongPeer(Exception):
    """Whoever listens there is no server of such sessions."""


class LinkHandler(Protocol):
    """What the application hears. Called on the link's thread."""

    def link_attached(self, attached: Attached, attachment: int) -> None: ...

    def link_body(self, body: Any, attachment: int) -> None: ...

    def link_lost(self, reason: str) -> None:
        """The connection of an attachment broke; the session may resume."""

    def link_rejected(self, reject: Reject) -> None:
        """The server refused the handshake; the link goes on trying. Told once for each reason, not at each attempt."""


class LinkClient:
    """Keeps one session alive over as many connections as it takes. `address` is HOST:PORT; raises UsageError."""

    def __init__(self, link: ClientLink[Any], address: str, edge: Edge, handler: LinkHandler, name: str) -> None:
        self._link = link
        self._address = parse_address(address)
        self._kind = edge.kind
        self._encode = edge.from_client.encode
        self._decode = edge.from_server.decode
        self._handler = handler
        self._name = name
        self._lock = threading.Lock()
        self._attachment = 0
        self._stopping = threading.Event()
        self._heartbeat_due_s = 0.0  # on the monotonic clock
        self._wire: Wire | None = None
        self._was_attached = False  # on the connection that is open, or was last
        self._refusal = ""  # why the last handshake was refused
        self._thread = threading.Thread(target=self._run, name=f"link {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """Close the connection and end the thread; `wait` for its end. What was posted and not sent is lost."""
        self._stopping.set()
        self._abort()
        if wait and self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def post(self, body: Any, attachment: int) -> None:
        """Say one body under `attachment`; without effect when the link is at another one.

        When the server was away for so long that the session is full, the session is given up: the next attachment is
        a fresh one.
        """
        with self._lock:
            if attachment != self._attachment:
                return
            try:
                self._link.post(body)
            except LinkOverflow as error:
                _log.error("%s: %s; the session is given up", self._name, error)
                self._give_up()
                return
            self._write_outgoing()

    def renew(self) -> None:
        """Give the session up: the next attachment is a fresh one, under another key."""
        with self._lock:
            self._give_up()

    def _give_up(self) -> None:
        """With the lock held."""
        self._attachment += 1
        self._link.renew(os.urandom(KEY_BYTES))
        if self._wire is not None:
            self._wire.abort()

    def _write_outgoing(self) -> None:
        """With the lock held."""
        frames = self._link.outgoing()
        if frames and self._wire is not None:
            self._wire.write(*map(self._encode, frames))
            self._heartbeat_due_s = time.monotonic() + HEARTBEAT_S

    def _abort(self) -> None:
        with self._lock:
            if self._wire is not None:
                self._wire.abort()

    # ---- the connection ----

    def _run(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        while not self._stopping.is_set():
            reason, was_attached = self._connect_once()
            if self._stopping.is_set():
                return
            if was_attached:
                backoff_s = BACKOFF_FIRST_S
                self._handler.link_lost(reason)
            _log.debug("%s: connection ended: %s", self._name, reason)
            self._stopping.wait(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_LAST_S)

    def _connect_once(self) -> tuple[str, bool]:
        """One connection, until it ends: why it did, and whether the session was attached on it."""
        try:
            wire = connect(self._address, SUSPECT_S)
        except OSError as error:
            return f"{self._address}: {error.strerror or error}", False
        with self._lock:
            hello = self._link.connect()
            self._wire = wire
        if self._stopping.is_set():
            wire.abort()
        wire.write(introduction(self._kind), self._encode(hello))
        self._was_attached = False
        try:
            self._converse(wire)
            reason = self._refusal or "ended by this side"
        except (LinkBroken, MalformedFrame, WireClosed) as error:
            reason = str(error)
        except WireSilent:
            reason = f"heard nothing for {SUSPECT_S:.0f} s"
        except WrongPeer as error:
            reason = str(error)
            if reason != self._refusal:
                self._refusal = reason
                _log.warning("%s: %s", self._name, reason)
        except Exception as error:  # a bug of ours: the next connection may do without what brought it about
            _log.exception("%s: a message could not be handled", self._name)
            reason = repr(error)
        finally:
            with self._lock:
                self._wire = None
                self._link.is_attached = False
            wire.close()
        return reason, self._was_attached

    def _converse(self, wire: Wire) -> None:
        """Read until the connection is over. Raises WireClosed, WireSilent, WrongPeer, LinkBroken, MalformedFrame."""
        try:
            served = kinds_served(wire.next(SUSPECT_S))
        except WireGarbled as error:
            raise WrongPeer(f"{self._address} does not speak the session protocol; is it the gRPC port?") from error
        if self._kind not in served:
            raise WrongPeer(f"{self._address} serves no sessions of the kind {self._kind!r}, but of {served}")
        wire.largest = MESSAGE_BYTES_MAX
        while not self._stopping.is_set():
            messages = wire.receive(self._wait_s(wire))
            if not messages and time.monotonic() - wire.heard_s >= SUSPECT_S:
                raise WireSilent
            for message in messages:
                if self._dispatch(self._decode(message)):
                    return

    def _wait_s(self, wire: Wire) -> float:
        """Time until something must be said; says it when that is now."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._heartbeat_due_s:
                self._heartbeat_due_s = now_s + HEARTBEAT_S
                if self._link.is_attached:
                    wire.write(self._encode(self._link.heartbeat()))
            return min(self._heartbeat_due_s - now_s, SUSPECT_S)

    def _dispatch(self, frame: Frame[Any]) -> bool:
        """Handle one frame; True ends the connection."""
        with self._lock:
            event = self._link.receive(frame)
            if isinstance(event, Attached):
                if event.fresh or self._attachment == 0:
                    self._attachment += 1
                self._write_outgoing()
            attachment = self._attachment
        match event:
            case Reject():
                if event.message != self._refusal:
                    self._refusal = event.message
                    self._handler.link_rejected(event)
                return True
            case Attached():
                self._was_attached = True
                self._refusal = ""
                self._handler.link_attached(event, attachment)
            case bodies:
                for body in bodies:
                    self._handler.link_body(body, attachment)
        return False
