"""The planner's end of the socket to one front door. Sending never blocks the planner.

    send --> [ socket ] --full--> [ backlog, bounded ] --writer thread--> socket
    reader thread --> received(message), ..., closed()

A front door that lets more than the backlog wait is cut off.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from coppice_scheduler.edge.ipc.door_messages import FrameError, FrameReader, Message, ToDoor, to_frame

_log = logging.getLogger("coppice.scheduler")
BACKLOG_BYTES_MAX = 32 * 1024 * 1024
_READ_BYTES = 256 * 1024


class DoorChannel:
    """`received` and `closed` run on a thread of the channel's own; `closed` is the last call."""

    def __init__(
        self,
        connection: socket.socket,
        received: Callable[[Message], None],
        closed: Callable[[], None],
        *,
        backlog_bytes_max: int = BACKLOG_BYTES_MAX,
    ) -> None:
        self._connection = connection
        self._received = received
        self._closed = closed
        self._backlog_bytes_max = backlog_bytes_max
        self._changed = threading.Condition()
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._is_closed = False
        self.heard_s = time.monotonic()  # when the front door said something last
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._read, "door reader"), (self._write, "door writer"))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def send(self, message: ToDoor) -> None:
        """Dropped when the channel is closed."""
        frame = to_frame(message)
        with self._changed:
            if self._is_closed:
                return
            if not self._backlog:
                frame = frame[self._send_now(frame) :]
            if not frame:
                return
            overrun = self._backlog_bytes > self._backlog_bytes_max
            self._backlog.append(frame)
            self._backlog_bytes += len(frame)
            self._changed.notify()
        if overrun:
            _log.warning("a front door does not read what it asked for; it is cut off")
            self.close()

    def close(self) -> None:
        """Cut the connection. `closed` follows."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait for the end after `close`."""
        for thread in self._threads:
            thread.join()
        self._connection.close()

    def _send_now(self, frame: bytes) -> int:
        """Bytes that the socket took without waiting."""
        try:
            return self._connection.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(frame)  # it is gone; the reader says so

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog or self._is_closed)
                if self._is_closed:
                    return
                frame = self._backlog[0]  # stays there while it is sent, so that nobody goes ahead of it
            try:
                self._connection.sendall(frame)
            except OSError:
                return
            with self._changed:
                self._backlog.popleft()
                self._backlog_bytes -= len(frame)

    def _read(self) -> None:
        frames = FrameReader()
        try:
            while data := self._connection.recv(_READ_BYTES):
                self.heard_s = time.monotonic()
                for message in frames.feed(data):
                    self._received(message)
        except OSError as error:
            _log.debug("a front door's connection broke: %s", error)
        except FrameError as error:
            _log.error("a front door sent what is no message: %s", error)
        self.close()
        self._closed()
