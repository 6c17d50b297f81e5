"""REST over TLS: the handshake, before the protocol of HTTP hears of a connection.

    connection made --10 s--> hands are shaken --> the protocol of HTTP, with its own limits
         +-- it counts as a connection; one too many is cut without a word

uvicorn can do TLS, too. Connections that do not shake hands would be counted by nobody there, and stay for a minute.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any


class TlsEntrance(asyncio.Protocol):
    """Shakes hands, then gives `inner` the connection. It stands in `connections`, those of the server, until then.

    `connections_max`: above so many it is cut. `timeout_s`: for the first words of TLS, and for its last.
    `context`: for the connections of now.
    """

    def __init__(
        self,
        inner: asyncio.Protocol,
        connections: set[Any],
        connections_max: int,
        timeout_s: float,
        context: Callable[[], ssl.SSLContext],
    ) -> None:
        self._inner = inner
        self._connections = connections
        self._connections_max = connections_max
        self._timeout_s = timeout_s
        self._context = context
        self._early: list[bytes] = []  # what came before the task was told that hands are shaken

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        if len(self._connections) >= self._connections_max:
            transport.abort()
            return
        self._connections.add(self)
        self._task = asyncio.get_running_loop().create_task(self._shake_hands(transport))

    async def _shake_hands(self, plain: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(
                plain,
                self,
                self._context(),
                server_side=True,
                ssl_handshake_timeout=self._timeout_s,
                ssl_shutdown_timeout=self._timeout_s,
            )
        except OSError:  # it went away, said what is no TLS, or nothing; of no interest to anybody but the client
            plain.abort()
            return
        finally:
            self._connections.discard(self)
        if secured is None:  # it went away as soon as hands were shaken
            return
        secured.set_protocol(self._inner)
        self._inner.connection_made(secured)
        for data in self._early:
            if not secured.is_closing():
                self._inner.data_received(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def shutdown(self) -> None:
        """The server ends."""
        self.transport.abort()
