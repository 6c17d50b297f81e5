"""TLS of an asyncio server: the handshake, before the protocol of HTTP hears of a connection.

    connection made --10 s--> hands are shaken --> the protocol of HTTP, with its own limits
         +-- one too many: the one that has been at it longest is cut, or the newcomer where none is at it

asyncio can do TLS, too. There a connection takes a buffer of 256 KiB from its first moment to its last, and nobody
counts those that do not shake hands. Here it takes what OpenSSL needs, from its first byte on.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from coppice.tls.channel import TlsChannel

HANDSHAKE_S = 10.0
# A process shakes some 1,000 hands in a second: with more at it, the oldest has been at it for about as long.
HANDSHAKES_MAX = 1024


class Handshakes:
    """Connections of one listener that have not shaken hands, the oldest first. On its event loop.

    `channel`: for a connection of now. `connections_max`: connections in all, with those that have.
    """

    def __init__(
        self,
        channel: Callable[[], TlsChannel],
        connections_max: int,
        handshakes_max: int = HANDSHAKES_MAX,
        timeout_s: float = HANDSHAKE_S,
    ) -> None:
        self.channel = channel
        self.timeout_s = timeout_s
        self.under_way: dict[TlsEntrance, None] = {}
        self._connections_max = connections_max
        self._handshakes_max = handshakes_max

    def make_room(self, num_connections: int) -> bool:
        """For one more beside so many connections in all. False: there is none."""
        if num_connections < self._connections_max and len(self.under_way) < self._handshakes_max:
            return True
        if not self.under_way:
            return False
        next(iter(self.under_way)).shutdown()
        return True


def behind_tls(protocol: Callable[..., asyncio.Protocol], handshakes: Handshakes) -> Callable[..., TlsEntrance]:
    """What uvicorn calls, as it would call the class of a protocol, for each connection."""

    def entrance(*, server_state: Any, **others: Any) -> TlsEntrance:
        return TlsEntrance(lambda: protocol(server_state=server_state, **others), server_state.connections, handshakes)

    return entrance


class TlsEntrance(asyncio.Protocol):
    """Shakes hands, then gives the connection to what `protocol` makes, and turns TLS into plain bytes for it.

    It stands in `connections`, those of the server, until hands are shaken.
    """

    def __init__(self, protocol: Callable[[], asyncio.Protocol], connections: set[Any], handshakes: Handshakes) -> None:
        self._protocol = protocol
        self._connections = connections
        self._handshakes = handshakes
        self._timer: asyncio.TimerHandle | None = None
        self._channel: TlsChannel | None = None  # from the first byte on
        self._inner: asyncio.Protocol | None = None  # once hands are shaken

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        if not self._handshakes.make_room(len(self._connections)):
            transport.abort()
            return
        self._connections.add(self)
        self._handshakes.under_way[self] = None
        self._timer = asyncio.get_running_loop().call_later(self._handshakes.timeout_s, self.shutdown)

    def data_received(self, data: bytes) -> None:
        if self._channel is None:
            self._channel = self._handshakes.channel()
        channel = self._channel
        try:
            channel.feed(data)
            if not channel.is_open and channel.shake_hands():
                self._open(channel)
            received = channel.read() if channel.is_open else b""
        except ssl.SSLError:  # no TLS, or none that we take; of no interest to anybody but the client
            self.transport.write(channel.outgoing())
            self.transport.close()
            return
        if not self.transport.is_closing():
            self.transport.write(channel.outgoing())
            if received and self._inner is not None:
                self._inner.data_received(received)
        if channel.heard_farewell:
            self.transport.close()

    def _open(self, channel: TlsChannel) -> None:
        self._leave()
        self._inner = self._protocol()
        self._inner.connection_made(TlsTransport(self.transport, channel))

    def connection_lost(self, error: Exception | None) -> None:
        self._leave()
        if self._inner is not None:
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def shutdown(self) -> None:
        """The server ends, somebody else needs the place, or its time is up."""
        self._leave()
        self.transport.abort()

    def _leave(self) -> None:
        """It is at no handshake any more."""
        self._connections.discard(self)
        self._handshakes.under_way.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()


class TlsTransport(asyncio.Transport):
    """What the protocol of HTTP writes to. All buffers are those of the connection below."""

    def __init__(self, plain: asyncio.Transport, channel: TlsChannel) -> None:
        super().__init__({"sslcontext": channel.context, "peercert": channel.certificate})
        self._plain = plain
        self._channel = channel

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        own = super().get_extra_info(name)
        return self._plain.get_extra_info(name, default) if own is None else own

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._plain.is_closing():
            return
        try:
            sealed = self._channel.sealed(data)
        except ssl.SSLError:  # what the client said meanwhile broke it
            self._plain.abort()
            return
        self._plain.write(sealed)

    def close(self) -> None:
        if not self._plain.is_closing():
            self._channel.say_farewell()
            self._plain.write(self._channel.outgoing())
            self._plain.close()

    def abort(self) -> None:
        self._plain.abort()

    def is_closing(self) -> bool:
        return self._plain.is_closing()

    def pause_reading(self) -> None:
        self._plain.pause_reading()

    def resume_reading(self) -> None:
        self._plain.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._plain.set_write_buffer_limits(high, low)

    @property
    def max_size(self) -> int:
        """Bytes that are read at once; asyncio's own name."""
        return int(self._plain.max_size)  # type: ignore[attr-defined]

    @max_size.setter
    def max_size(self, size: int) -> None:
        self._plain.max_size = size  # type: ignore[attr-defined]
