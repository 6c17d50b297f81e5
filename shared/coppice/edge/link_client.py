"""The connecting end of a session: one thread that connects, reads and reconnects.

The application talks to it through `post`, which writes to the connection at once, and hears from it through a
`LinkHandler`, whose methods are called on the reader's thread and must be quick or hand over. A body is posted under
the attachment that the application believes in: what it posts after the link moved on, but before it heard of that,
is dropped here, because a fresh attachment starts with the application's reconciliation and with nothing else.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from coppice.addresses import parse_session_address
from coppice.edge.codec import Edge, MalformedFrame
from coppice.edge.told_once import Outage
from coppice.edge.wire import (
    PROTOCOL,
    MessageTooLong,
    Wire,
    WireClosed,
    WireGarbled,
    WireSilent,
    WireUntrusted,
    connect,
    introduction,
    kinds_served,
)
from coppice.session.frames import KEY_BYTES, Frame, Reject
from coppice.session.link import OUTBOX_MAX, Attached, ClientLink, LinkBroken, LinkOverflow
from coppice.tls.credentials import Credentials
from coppice.tls.rights import why_not_server

HEARTBEAT_S = 1.0
SUSPECT_S = 3.0
BACKOFF_FIRST_S = 0.05
BACKOFF_LAST_S = 1.0
OUTAGE_TOLD_S = 3.0  # what lasts longer is no restart of the peer
OUTAGE_TOLD_AGAIN_S = 60.0

_log = logging.getLogger(__name__)


class WrongPeer(Exception):
    """Whoever listens there is no server of such sessions."""


class LinkHandler(Protocol):
    """What the application hears. Called on the link's thread."""

    def link_attached(self, attached: Attached, attachment: int) -> None: ...

    def link_body(self, body: Any, attachment: int) -> None: ...

    def link_lost(self, reason: str) -> None:
        """The connection of an attachment broke, and why, with the address; the session may resume."""

    def link_rejected(self, reject: Reject) -> None:
        """The server refused the handshake; the link goes on trying. Told once for each reason, not at each attempt."""


class LinkClient:
    """Keeps one session alive over as many connections as it takes, from `start` on."""

    def __init__(
        self,
        edge: Edge,
        address: str,
        handler: LinkHandler,
        name: str,
        peer: str,
        *,
        epoch: int = 0,
        voucher: bytes = b"",
        outbox_max: int = OUTBOX_MAX,
        tls: Credentials | None = None,
        certified: str = "",
        nobody_listens: Callable[[], None] | None = None,
    ) -> None:
        """`address`: HOST:PORT or unix:/PATH; `name` and `peer` are for people; `epoch`: that of the session, where the
        client has it already, and the `voucher` for it. With `tls`, whoever answers over TCP must be of the role that
        serves such sessions, and have the name `certified` unless that is empty. `nobody_listens` is called, on the
        link's thread, at each attempt that finds no process at the address. Raises UsageError."""
        self._link: ClientLink[Any] = ClientLink(os.urandom(KEY_BYTES), name, outbox_max=outbox_max, speaks=edge.speaks)
        self._link.epoch, self._link.voucher = epoch, voucher
        self._address = parse_session_address(address)
        self._tls = tls
        self._certified = certified
        self._nobody_listens = nobody_listens
        self._kind = edge.kind
        self._highest = edge.speaks.highest
        self._bounds = {"takes": edge.server_bytes_max, "sends": edge.client_bytes_max}
        self._encode = edge.from_client.encode
        self._decode = edge.from_server.decode
        self._handler = handler
        self._name = f"{name} to {peer}"
        self._lock = threading.Lock()
        self._attachment = 0
        self._stopping = threading.Event()
        self._hurry = threading.Event()  # the pause before the next attempt is over
        self._heartbeat_due_s = 0.0  # on the monotonic clock
        self._wire: Wire | None = None
        self._was_attached = False  # on the connection that is open, or was last
        self._refusal = ""  # why the last handshake was refused
        self._outage = Outage(OUTAGE_TOLD_S, OUTAGE_TOLD_AGAIN_S)
        self._thread = threading.Thread(target=self._run, name=f"link {self._name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, wait: bool = True) -> None:
        """Close the connection and end the thread; `wait` for its end. What was posted and not sent is lost."""
        self._stopping.set()
        self._hurry.set()
        self._abort()
        if wait and self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)

    def post(self, body: Any, attachment: int) -> None:
        """Say one body under `attachment`; without effect when the link is at another one.

        A server of an older protocol is not sent what it does not know. When the server was away for so long that the
        session is full, the session is given up: the next attachment is a fresh one.
        """
        with self._lock:
            if attachment != self._attachment or self._link.version < body.SINCE:
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

    def take_voucher(self, voucher: bytes) -> None:
        """What the next handshakes show. With another one than before the server is there again, and tried at once."""
        with self._lock:
            is_another = voucher != self._link.voucher
            self._link.voucher = voucher
        if is_another:
            self._hurry.set()

    @property
    def shown(self) -> tuple[bytes, int, int, bytes]:
        """What its handshakes show of the session that it has: key, incarnation, epoch, voucher."""
        with self._lock:
            link = self._link
            return link.key, link.incarnation, link.epoch, link.voucher

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
            try:
                self._wire.write(*map(self._encode, frames))
            except MessageTooLong as error:  # resumed, the session would bring the same once more
                _log.error("%s: %s; the session is given up", self._name, error)
                self._give_up()
            self._heartbeat_due_s = time.monotonic() + HEARTBEAT_S

    def _abort(self) -> None:
        with self._lock:
            if self._wire is not None:
                self._wire.abort()

    # ---- the connection ----

    def _run(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        while not self._stopping.is_set():
            self._outage.begin(time.monotonic())
            reason, was_attached = self._connect_once()
            if self._stopping.is_set():
                return
            if was_attached:
                backoff_s = BACKOFF_FIRST_S
                self._outage.told(time.monotonic(), reason)
                self._handler.link_lost(f"{self._address}: {reason}")
            else:
                self._tell_outage(reason)
            _log.debug("%s: connection ended: %s", self._name, reason)
            if self._hurry.wait(backoff_s):
                self._hurry.clear()
                backoff_s = BACKOFF_FIRST_S
            else:
                backoff_s = min(backoff_s * 2, BACKOFF_LAST_S)

    def _connect_once(self) -> tuple[str, bool]:
        """One connection, until it ends: why it did, and whether the session was attached on it."""
        try:
            wire = self._open()
        except WireUntrusted as error:
            self._refused_because(str(error))
            return self._refusal, False
        except (WireClosed, WireSilent) as error:
            return f"{str(error) or 'silence'} during the handshake of TLS; does that port want it?", False
        except OSError as error:
            if self._nobody_listens is not None and isinstance(error, ConnectionRefusedError | FileNotFoundError):
                self._nobody_listens()
            return _why_not_connected(error), False
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
        except WireUntrusted as error:  # our certificate is looked at after we have spoken
            self._refused_because(reason := str(error))
        except (LinkBroken, WireClosed) as error:
            reason = str(error)
        except MalformedFrame as error:
            reason = str(error)
            self.renew()  # resumed, the session would bring the same once more
        except WireSilent:
            reason = f"heard nothing for {SUSPECT_S:.0f} s"
        except WrongPeer as error:
            self._refused_because(reason := str(error))
        except Exception as error:  # a bug of ours: the next connection may do without what brought it about
            _log.exception("%s: a message could not be handled", self._name)
            reason = repr(error)
        finally:
            with self._lock:
                self._wire = None
                self._link.is_attached = False
            wire.close()
        return reason, self._was_attached

    def _open(self) -> Wire:
        """A connection to who should be there. Raises OSError, WireClosed, WireSilent."""
        wire = connect(self._address, SUSPECT_S)
        if self._tls is None or wire.is_local:
            return wire
        try:
            server = wire.start_tls(self._tls.channel(is_server=False), SUSPECT_S)
            if why_not := why_not_server(server, self._kind, self._certified):
                raise WireUntrusted(why_not)
        except BaseException:
            wire.close()
            raise
        return wire

    def _refused_because(self, reason: str) -> None:
        """Told at once, not at each attempt."""
        if reason != self._refusal:
            self._refusal = reason
            self._outage.told(time.monotonic(), reason)
            _log.warning("%s: %s: %s", self._name, self._address, reason)

    def _tell_outage(self, reason: str) -> None:
        """When it has lasted for a while, and again from time to time."""
        lasted_s = self._outage.to_tell_s(time.monotonic(), reason)
        if lasted_s is not None:
            told = (self._name, lasted_s, self._address, reason)
            _log.warning("%s: no connection for %.0f s (%s: %s); trying on", *told)

    def _converse(self, wire: Wire) -> None:
        """Read until the connection is over. Raises WireClosed, WireSilent, WrongPeer, LinkBroken, MalformedFrame."""
        try:
            introduced = wire.next(SUSPECT_S)
        except WireGarbled as error:
            raise WrongPeer("it does not speak the session protocol; is it the gRPC port?") from error
        served = kinds_served(introduced)
        if not served:
            raise WrongPeer(f"it says {introduced[:40]!r} in place of {PROTOCOL!r}: another version?")
        if self._kind not in served:
            raise WrongPeer(f"it serves no sessions of the kind {self._kind!r}, but of {served}")
        wire.trust(**self._bounds)
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
            if isinstance(event, Attached) and (event.fresh or self._attachment == 0):
                self._attachment += 1
            attachment = self._attachment
            if isinstance(event, Attached):
                self._write_outgoing()  # which may give the session up, and what is posted under this attachment
        match event:
            case Reject():
                if event.message != self._refusal:
                    self._refusal = event.message
                    self._outage.told(time.monotonic(), event.message)
                    self._handler.link_rejected(event)
                return True
            case Attached():
                self._was_attached = True
                self._refusal = ""
                if self._outage.end():
                    _log.info("%s: connected", self._name)
                if event.fresh and event.version < self._highest:
                    _log.info("%s: session protocol %d, as the server is of an older build", self._name, event.version)
                self._handler.link_attached(event, attachment)
            case bodies:
                for body in bodies:
                    self._handler.link_body(body, attachment)
        return False


def _why_not_connected(error: OSError) -> str:
    text = error.strerror or str(error)
    return f"the name is not resolved: {text}" if isinstance(error, socket.gaierror) else text
