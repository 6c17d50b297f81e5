"""Messages over one TCP connection between two services: a length, then that many bytes.

    | u32 little-endian: length | a frame of the session protocol, in protobuf |

Either side names itself in its first message, so that a wrong port is told apart from a broken session:

    client: coppice/1 index                     the kind of session that it wants
    server: coppice/1 index workers             the kinds that this port serves

`write` sends from the thread that has something to say, and the reading thread handles what it read: a message costs
one thread's waking on each side. A gRPC stream costs three (its writer, its poller, its reader), which was 1.3 ms and
0.9 ms of processor time for a round trip against 0.35 and 0.17 here, the same bytes on the same two cores.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque

from coppice.addresses import Address

MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # a registration carries 24 bytes per block
FIRST_BYTES_MAX = 4096  # of a message of somebody who is not known yet
PROTOCOL = "coppice/1"
_LENGTH_BYTES = 4
_READ_BYTES = 1 << 18
_FINISH_S = 1.0


class MessageTooLong(Exception):
    """No connection takes a message of this size."""


class WireClosed(Exception):
    """The connection is over; the text says how."""


class WireGarbled(WireClosed):
    """What came is no message of ours."""


class WireSilent(Exception):
    """Nothing came in time."""


class Wire:
    """One connection. `write`, `wake` and `abort` may be called from any thread, the rest from the reading one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._writing = threading.Lock()
        self._unsent = bytearray()  # what the kernel did not take yet
        self._is_closed = False
        self._received = bytearray()
        self._messages: deque[bytes] = deque()
        self.heard_s = time.monotonic()  # when something came last
        self.largest = FIRST_BYTES_MAX  # message that is taken, in bytes
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)

    # ---- any thread ----

    def write(self, *messages: bytes) -> None:
        """Say all of them, in order. What does not fit into the kernel's buffer now is sent by the reading thread.
        On a connection that is over it has no effect: the reading thread hears of that. Raises MessageTooLong."""
        largest = max(map(len, messages))
        if largest > MESSAGE_BYTES_MAX:
            raise MessageTooLong(f"a message of {largest} bytes; at most {MESSAGE_BYTES_MAX} are sent")
        data = b"".join(len(message).to_bytes(_LENGTH_BYTES, "little") + message for message in messages)
        with self._writing:
            if self._is_closed:
                return
            if self._unsent:
                self._unsent += data
                return
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return
            if sent < len(data):
                self._unsent += memoryview(data)[sent:]
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

    def _wake_locked(self) -> None:
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            pass  # enough of them wait there

    # ---- the reading thread ----

    def next(self, timeout_s: float) -> bytes:
        """One message. Raises WireSilent, WireClosed."""
        ends_s = time.monotonic() + timeout_s
        self._split(1)
        while not self._messages:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise WireSilent
            self._wait(left_s)
            self._split(1)
        return self._messages.popleft()

    def receive(self, timeout_s: float) -> list[bytes]:
        """What has come, in order; nothing when the time is over or somebody woke it. Raises WireClosed."""
        self._split()
        if not self._messages:
            self._wait(timeout_s)
            self._split()
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def finish(self) -> None:
        """Close, so that the peer can still read what was written last."""
        ends_s = time.monotonic() + _FINISH_S
        try:
            while self._unsent and time.monotonic() < ends_s:
                self._wait(ends_s - time.monotonic())
                self._received.clear()
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
        self._received += data

    def _split(self, at_most: int = 1 << 30) -> None:
        """Whole messages out of what was read. Raises WireClosed on one that is too long."""
        start = 0
        with memoryview(self._received) as received:
            while len(self._messages) < at_most and len(received) - start >= _LENGTH_BYTES:
                size = int.from_bytes(received[start : start + _LENGTH_BYTES], "little")
                if size > self.largest:
                    raise WireGarbled(f"a message of {size} bytes was announced; at most {self.largest} are taken")
                end = start + _LENGTH_BYTES + size
                if len(received) < end:
                    break
                self._messages.append(bytes(received[start + _LENGTH_BYTES : end]))
                start = end
        del self._received[:start]


def introduction(*kinds: str) -> bytes:
    return " ".join((PROTOCOL, *kinds)).encode()


def kinds_served(introduced: bytes) -> list[str]:
    """Kinds of sessions that the other side named; none when it speaks something else."""
    protocol, *kinds = introduced.decode(errors="replace").split(" ")
    return kinds if protocol == PROTOCOL else []


def connect(address: Address, timeout_s: float) -> Wire:
    """Raises OSError."""
    return Wire(socket.create_connection((address.host, address.port), timeout=timeout_s))


def _shut(connection: socket.socket, how: int) -> None:
    try:
        connection.shutdown(how)
    except OSError:
        pass  # the other side was faster


def _text(error: OSError) -> str:
    return error.strerror or str(error)
