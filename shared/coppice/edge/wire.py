"""Messages over one connection between two processes: a length, then that many bytes.

    | u32 little-endian: length | a message (`coppice.edge.codec`) |

Sessions run over TCP or a Unix socket (`session_socket`), a front door and its planner over a pair of sockets. In a
session either side names itself in its first message, so that a wrong port is told apart from a broken session:

    client: coppice/2 index                     the kind of session that it wants
    server: coppice/2 index workers             the kinds that this port serves

With TLS all of that is inside, and `start_tls` comes before anything else. Where a connection is cut without a farewell
of TLS, it is closed as any other: sessions count their messages and resume, so nothing can be cut off unnoticed.

`write` sends from the thread that has something to say, and the reading thread handles what it read: a message costs
one thread's waking on each side. A gRPC stream costs three (its writer, its poller, its reader), which was 1.3 ms and
0.9 ms of processor time for a round trip against 0.35 and 0.17 here, the same bytes on the same two cores.
"""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator

from coppice.addresses import SessionAddress
from coppice.edge import session_socket
from coppice.tls.channel import TlsChannel, tls_reason
from coppice.tls.identity import Identity, NoIdentity, identity_of

_log = logging.getLogger(__name__)
MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # of any kind of session; `codec` has the bounds of each
BACKLOG_MESSAGES = 4  # as long as they may be, that the other side has not read; who lets more wait is cut off
FIRST_BYTES_MAX = 4096  # of a message of somebody who is not known yet
PROTOCOL = "coppice/2"
_LENGTH_BYTES = 4
_READ_BYTES = 1 << 18
_LONG_BYTES = 1 << 16  # a message of so many bytes is worth a call of its own
_FINISH_S = 1.0


class MessageTooLong(Exception):
    """No connection takes a message of this size."""


class WireClosed(Exception):
    """The connection is over; the text says how."""


class WireGarbled(WireClosed):
    """What came is no message of ours."""


class WireUntrusted(WireClosed):
    """TLS with the other side failed, or its certificate names nobody of ours."""


class WireSilent(Exception):
    """Nothing came in time."""


class Splitter:
    """Bytes in, messages out. `largest`: message that is taken, in bytes."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self._received = bytearray()

    def feed(self, data: bytes) -> None:
        self._received += data

    def split(self, at_most: int = 1 << 30) -> list[memoryview]:
        """Whole messages that came, where they lie. Raises WireGarbled on one that is too long, also before all of it
        came."""
        messages: list[memoryview] = []
        start = 0
        with memoryview(self._received) as received:
            while len(messages) < at_most and len(received) - start >= _LENGTH_BYTES:
                size = int.from_bytes(received[start : start + _LENGTH_BYTES], "little")
                if size > self.largest:
                    raise WireGarbled(f"a message of {size} bytes was announced; at most {self.largest} are taken")
                end = start + _LENGTH_BYTES + size
                if len(received) < end:
                    break
                messages.append(received[start + _LENGTH_BYTES : end])
                start = end
            if messages:
                self._received = bytearray(received[start:])
        return messages

    def clear(self) -> None:
        self._received = bytearray()


def framed(*messages: bytes) -> Iterator[bytes]:
    """As they stand on a connection: in one piece, but for long ones, which are not copied for it."""
    piece: list[bytes] = []
    for message in messages:
        piece.append(len(message).to_bytes(_LENGTH_BYTES, "little"))
        if len(message) < _LONG_BYTES:
            piece.append(message)
        else:
            yield b"".join(piece)
            yield message
            piece.clear()
    if piece:
        yield b"".join(piece)


def packed(*messages: bytes) -> bytes:
    """The same in one piece."""
    return b"".join(framed(*messages))


class Wire:
    """One connection. `write`, `wake` and `abort` may be called from any thread, the rest from the reading one."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        backlog_bytes_max: int = BACKLOG_MESSAGES * MESSAGE_BYTES_MAX,
    ) -> None:
        """Until `trust` no message above FIRST_BYTES_MAX is taken."""
        connection.setblocking(False)
        self.is_local = connection.family == socket.AF_UNIX
        if not self.is_local:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._writing = threading.Lock()
        self._unsent = bytearray()  # what the kernel did not take yet, as it goes over the network
        self._tls: TlsChannel | None = None  # under the lock
        self.peer: Identity | None = None  # where TLS told
        self._message_bytes_max = message_bytes_max
        self._backlog_bytes_max = backlog_bytes_max
        self._is_closed = False
        self._received = Splitter(FIRST_BYTES_MAX)
        self.heard_s = time.monotonic()  # when something came last
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)

    # ---- any thread ----

    def write(self, *messages: bytes) -> None:
        """Say all of them, in order. What does not fit into the kernel's buffer now is sent by the reading thread; the
        connection ends when more than the backlog waits there already. On a connection that is over it has no effect:
        the reading thread hears of that. Raises MessageTooLong."""
        largest = max(map(len, messages))
        if largest > self._message_bytes_max:
            raise MessageTooLong(f"a message of {largest} bytes; at most {self._message_bytes_max} are sent")
        with self._writing:
            if self._is_closed:
                return
            if len(self._unsent) > self._backlog_bytes_max:
                _log.warning(
                    "the other side does not read what was sent; %d bytes wait; it is cut off", len(self._unsent)
                )
                _shut(self._socket, socket.SHUT_RDWR)
                return
            is_sending = bool(self._unsent)
            try:
                for piece in framed(*messages):
                    self._send_locked(piece if self._tls is None else self._tls.sealed(piece))
            except OSError:
                return
            if self._unsent and not is_sending:
                self._wake_locked()

    def wake(self) -> None:
        """Let `receive` return."""
        with self._writing:
            if not self._is_closed:
                self._wake_locked()

    def abort(self) -> None:
        """End it now: whoever reads, here and there, finds it closed."""
        with self._writing:
            if not self._is_closed:
                _shut(self._socket, socket.SHUT_RDWR)

    def _send_locked(self, data: bytes) -> None:
        """What the kernel does not take now waits. Raises OSError."""
        if self._unsent:
            self._unsent += data
            return
        try:
            sent = self._socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._unsent += memoryview(data)[sent:]

    def _wake_locked(self) -> None:
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            pass  # enough of them wait there

    # ---- the reading thread ----

    def start_tls(self, channel: TlsChannel, timeout_s: float) -> Identity:
        """Shake hands, before anything is written or read: who the other side is. Raises WireUntrusted, WireClosed,
        WireSilent."""
        self._tls = channel
        ends_s = time.monotonic() + timeout_s
        while not self._shake_hands(channel):
            if (left_s := ends_s - time.monotonic()) <= 0:
                raise WireSilent
            self._wait(left_s)
        try:
            self.peer = identity_of(channel.certificate)
        except NoIdentity as error:
            raise WireUntrusted(str(error)) from error
        self._open_sealed(b"")  # what came with the end of the handshake
        return self.peer

    def _shake_hands(self, channel: TlsChannel) -> bool:
        with self._writing:
            try:
                return channel.shake_hands()
            except ssl.SSLError as error:
                raise WireUntrusted(tls_reason(error)) from error
            finally:
                self._send_sealed_locked(channel)

    def trust(self, *, takes: int = 0, sends: int = 0) -> None:
        """The other side is known: messages may be long from now on, theirs and ours up to so many bytes; 0: as many as
        this connection was made for."""
        self._received.largest = takes or self._message_bytes_max
        if sends:
            self._message_bytes_max, self._backlog_bytes_max = sends, BACKLOG_MESSAGES * sends

    def next(self, timeout_s: float) -> bytes:
        """One message. Raises WireSilent, WireClosed."""
        ends_s = time.monotonic() + timeout_s
        while not (found := self._received.split(1)):
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise WireSilent
            self._wait(left_s)
        return bytes(found[0])

    def receive(self, timeout_s: float) -> list[memoryview]:
        """What has come, in order; nothing when the time is over or somebody woke it. Raises WireClosed."""
        messages = self._received.split()
        if not messages:
            self._wait(timeout_s)
            messages = self._received.split()
        return messages

    def finish(self) -> None:
        """Close, so that the peer can still read what was written last."""
        ends_s = time.monotonic() + _FINISH_S
        try:
            while self._unsent and time.monotonic() < ends_s:
                self._wait(ends_s - time.monotonic())
                self._received.clear()
            self._say_farewell()
            # Closing with bytes unread would reset the connection, and the peer would lose what it has not read yet.
            _shut(self._socket, socket.SHUT_WR)
            while (left_s := ends_s - time.monotonic()) > 0:
                self._wait(left_s)
                self._received.clear()
        except WireClosed:
            pass
        self.close()

    def close(self) -> None:
        with self._writing:
            self._is_closed = True
            self._socket.close()
            self._woken.close()
            self._waker.close()

    def _wait(self, timeout_s: float) -> None:
        """Until something came, was sent or woke us. Raises WireClosed."""
        wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        self._poll.register(self._socket, wanted)
        for descriptor, events in self._poll.poll(max(0.0, timeout_s) * 1_000):
            if descriptor == self._woken.fileno():
                self._woken.recv(_READ_BYTES)
                continue
            if events & ~select.POLLOUT:  # first: a peer that is gone may have said why
                self._read()
            if events & select.POLLOUT:
                self._send_rest()

    def _send_rest(self) -> None:
        with self._writing:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                raise WireClosed(_text(error)) from error
            del self._unsent[:sent]

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise WireClosed(_text(error)) from error
        if not data:
            raise WireClosed("closed by the other side")
        self.heard_s = time.monotonic()
        if self._tls is None:
            self._received.feed(data)
        else:
            self._open_sealed(data)

    def _open_sealed(self, data: bytes) -> None:
        with self._writing:
            channel = self._tls
            assert channel is not None
            channel.feed(data)
            if not channel.is_open:
                return  # for the handshake to read
            try:
                opened = channel.read()
            except ssl.SSLError as error:
                raise WireUntrusted(tls_reason(error)) from error
            finally:
                self._send_sealed_locked(channel)  # an answer of TLS itself, such as to new keys
        self._received.feed(opened)

    def _send_sealed_locked(self, channel: TlsChannel) -> None:
        if data := channel.outgoing():
            try:
                self._send_locked(data)
            except OSError:
                pass  # the reader hears of it

    def _say_farewell(self) -> None:
        with self._writing:
            if self._tls is not None and self._tls.is_open:
                self._tls.say_farewell()
                self._send_sealed_locked(self._tls)


def introduction(*kinds: str) -> bytes:
    return " ".join((PROTOCOL, *kinds)).encode()


def kinds_served(introduced: bytes) -> list[str]:
    """Kinds of sessions that the other side named; none when it speaks something else, or another version."""
    protocol, *kinds = introduced.decode(errors="replace").split(" ")
    return kinds if protocol == PROTOCOL else []


def connect(address: SessionAddress, timeout_s: float) -> Wire:
    """Raises OSError."""
    return Wire(session_socket.connect(address, timeout_s))


def _shut(connection: socket.socket, how: int) -> None:
    try:
        connection.shutdown(how)
    except OSError:
        pass  # the other side was faster


def _text(error: OSError) -> str:
    return error.strerror or str(error)
