"""One end of a connection between processes of schedulers: parent, planner, front doors. Sending never blocks.

send --> wire --> the other process     what it does not read waits; with more than the backlog it is cut off
reader thread --> received(message), ..., closed()
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from coppice.edge.codec import Codec, MalformedFrame
from coppice.edge.wire import MessageTooLong, Wire, WireClosed, WireSilent
from coppice_scheduler.edge.ipc.door_messages import BACKLOG_BYTES_MAX, MESSAGE_BYTES_MAX

_log = logging.getLogger("coppice.scheduler")
_READ_S = 60.0

SaidT = TypeVar("SaidT")
HeardT = TypeVar("HeardT")


class MessageChannel(Generic[SaidT, HeardT]):
    """`received` and `closed` run on a thread of the channel's own; `closed` is the last call."""

    def __init__(
        self,
        connection: socket.socket,
        says: Codec[SaidT],
        hears: Codec[HeardT],
        received: Callable[[HeardT], None],
        closed: Callable[[], None],
        *,
        peer: str,
        backlog_bytes_max: int = BACKLOG_BYTES_MAX,
    ) -> None:
        """`peer`: for people."""
        self._wire = Wire(connection, message_bytes_max=MESSAGE_BYTES_MAX, backlog_bytes_max=backlog_bytes_max)
        self._encode: Callable[[Any], bytes] = says.encode
        self._decode = hears.decode
        self._received = received
        self._closed = closed
        self._peer = peer
        self._silent_s = math.inf  # after which it is cut off
        self._thread = threading.Thread(target=self._read, name=peer, daemon=True)
        self.is_closed = False

    def start(self) -> None:
        self._thread.start()

    @property
    def heard_s(self) -> float:
        """When the other process said something last, on the monotonic clock."""
        return self._wire.heard_s

    def send(self, message: SaidT) -> None:
        """Dropped when the channel is closed."""
        try:
            self._wire.write(self._encode(message))
        except MessageTooLong as error:
            _log.error("%s is cut off: %s", self._peer, error)
            self.close()

    def close(self) -> None:
        """Cut the connection. `closed` follows."""
        self.is_closed = True
        self._wire.abort()

    def join(self) -> None:
        """Wait for the end after `close`."""
        self._thread.join()

    def _greet(self) -> None:
        """Before anything is read. Raises WireClosed, WireSilent."""
        self._wire.trust()

    def _read(self) -> None:
        try:
            self._greet()
            while True:
                for data in self._wire.receive(min(_READ_S, self._silent_s)):
                    self._received(self._decode(data))
                if time.monotonic() - self._wire.heard_s > self._silent_s:
                    raise WireSilent
        except WireClosed as closed:
            _log.debug("the connection to %s ended: %s", self._peer, closed)
        except WireSilent:
            _log.debug("%s is cut off: it was silent", self._peer)
        except MalformedFrame as error:
            _log.error("%s is cut off: %s", self._peer, error)
        self.is_closed = True
        self._wire.close()
        self._closed()
