"""The planner's end of the connection to one front door. Sending never blocks the planner.

send --> wire --> front door            what it does not read waits; with more than the backlog it is cut off
reader thread --> received(message), ..., closed()
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from coppice.edge.codec import MalformedFrame
from coppice.edge.wire import MessageTooLong, Wire, WireClosed
from coppice_scheduler.edge.ipc.door_messages import (
    BACKLOG_BYTES_MAX,
    FROM_DOOR,
    MESSAGE_BYTES_MAX,
    TO_DOOR,
    FromDoor,
    ToDoor,
)

_log = logging.getLogger("coppice.scheduler")
_READ_S = 60.0


class DoorChannel:
    """`received` and `closed` run on a thread of the channel's own; `closed` is the last call."""

    def __init__(
        self,
        connection: socket.socket,
        received: Callable[[FromDoor], None],
        closed: Callable[[], None],
        *,
        backlog_bytes_max: int = BACKLOG_BYTES_MAX,
    ) -> None:
        self._wire = Wire(connection, message_bytes_max=MESSAGE_BYTES_MAX, backlog_bytes_max=backlog_bytes_max)
        self._wire.trust()
        self._received = received
        self._closed = closed
        self._thread = threading.Thread(target=self._read, name="door", daemon=True)
        self.is_closed = False

    def start(self) -> None:
        self._thread.start()

    @property
    def heard_s(self) -> float:
        """When the front door said something last, on the monotonic clock."""
        return self._wire.heard_s

    def send(self, message: ToDoor) -> None:
        """Dropped when the channel is closed."""
        try:
            self._wire.write(TO_DOOR.encode(message))
        except MessageTooLong as error:
            _log.error("a front door is cut off: %s", error)
            self.close()

    def close(self) -> None:
        """Cut the connection. `closed` follows."""
        self.is_closed = True
        self._wire.abort()

    def join(self) -> None:
        """Wait for the end after `close`."""
        self._thread.join()

    def _read(self) -> None:
        try:
            while True:
                for data in self._wire.receive(_READ_S):
                    self._received(FROM_DOOR.decode(data))
        except WireClosed as closed:
            _log.debug("a front door's connection ended: %s", closed)
        except MalformedFrame as error:
            _log.error("a front door is cut off: %s", error)
        self.is_closed = True
        self._wire.close()
        self._closed()
