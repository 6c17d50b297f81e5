"""HTTP/1.1 on a plain asyncio transport: one request at a time on a connection, connections used again.

A load generator that costs more than the server measures itself. Nothing here is done per token but to take the
framing off and to hand the bytes on, with one reading of the clock for all that arrived together.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from coppice.errors import UsageError
from coppice_bench.serve.load.answer import Answer

HEAD_BYTES_MAX = 64 * 1024
_CONNECT_S = 10.0
_IDLE_MAX = 1024


class FramingError(Exception):
    """The server said something that is no HTTP/1.1 answer."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens. `base` is the path before `/v1`."""

    host: str
    port: int
    base: str
    tls: bool

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """`http://HOST:PORT`, with or without `/v1`. Raises UsageError."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UsageError(f"--url {url} is no address of a server", hint="give http://HOST:PORT")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), base, tls)

    def request(self, method: str, path: str, body: bytes = b"", api_key: str = "") -> bytes:
        """The whole request, ready to be sent."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.base}{path} HTTP/1.1", f"Host: {host}:{self.port}", f"Content-Length: {len(body)}"]
        if body:
            lines.append("Content-Type: application/json")
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


class _Chunks:
    """Takes the chunked transfer coding off. `is_over` after the last chunk and its trailers."""

    __slots__ = ("_in_trailers", "_left", "_rest", "is_over")

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0  # of the current chunk, with the line end after it
        self._in_trailers = False
        self.is_over = False

    def feed(self, data: bytes) -> bytes:
        data = self._rest + data
        pieces: list[bytes] = []
        at = 0
        while not self.is_over:
            if self._left:
                taken = min(len(data) - at, max(0, self._left - 2))
                pieces.append(data[at : at + taken])
                at += taken
                self._left -= taken
                if len(data) - at < self._left:
                    break
                at += self._left
                self._left = 0
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            self._line(data[at:end])
            at = end + 2
        self._rest = data[at:]
        return b"".join(pieces)

    def _line(self, line: bytes) -> None:
        if self._in_trailers:
            self.is_over = not line
            return
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:
            raise FramingError(f"{line[:40]!r} is no size of a chunk") from None
        self._left = size + 2 if size else 0
        self._in_trailers = not size


class _Connection(asyncio.Protocol):
    """Waits for one answer at a time. After it `is_reusable` tells whether another request may follow."""

    def __init__(self) -> None:
        self.is_reusable = True
        self.was_used = False
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._over: asyncio.Future[None] | None = None
        self._head = b""
        self._chunks: _Chunks | None = None
        self._length_left = -1  # -1: until the connection closes
        self.got_bytes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Returns when the answer is over, or the connection; then `answer.failure` says so."""
        assert self._transport is not None
        self._answer, self._head, self._chunks, self._length_left = answer, b"", None, -1
        self.got_bytes = False
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._over
        finally:
            self._answer = None
            self.was_used = True

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        if self._answer is None:
            return self.close()  # something that nobody asked for
        self.got_bytes = True
        try:
            if self._answer.status == 0:
                self._head += data
                head, separator, data = self._head.partition(b"\r\n\r\n")
                if not separator:
                    if len(self._head) > HEAD_BYTES_MAX:
                        raise FramingError(f"headers of more than {HEAD_BYTES_MAX} bytes")
                    return None
                self._begin(self._answer, head)
            self._body(self._answer, data, now_s)
        except FramingError as error:
            self._end(f"no HTTP: {error}")
            self.close()

    def _begin(self, answer: Answer, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        words = first.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise FramingError(f"an answer begins with {first[:40]!r}")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        if headers.get(b"connection", b"").lower() == b"close" or words[0] == b"HTTP/1.0":
            self.is_reusable = False
        if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
            self._chunks = _Chunks()
        elif (length := headers.get(b"content-length", b"")).isdigit():
            self._length_left = int(length)
        else:
            self.is_reusable = False
        answer.headers = headers
        answer.begin(int(words[1]), headers.get(b"content-type", b"").lower())

    def _body(self, answer: Answer, data: bytes, now_s: float) -> None:
        if self._chunks is not None:
            answer.payload(self._chunks.feed(data), now_s)
            is_over = self._chunks.is_over
        else:
            answer.payload(data, now_s)
            self._length_left -= len(data) if self._length_left >= 0 else 0
            is_over = self._length_left == 0
        if is_over:
            answer.end_s = now_s
            self._end("")

    def _end(self, failure: str) -> None:
        if self._answer is not None and failure:
            self._answer.failure = failure
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        if self._answer is None:
            return
        read_to_end = self._answer.status and self._chunks is None and self._length_left < 0
        self._answer.end_s = time.monotonic()
        self._end("" if read_to_end else "the connection was closed in the middle of an answer")


class HttpClient:
    """Requests to one server. Connections are opened as they are needed and kept."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if endpoint.tls else None

    async def send(self, request: bytes, answer: Answer, timeout_s: float) -> None:
        """Fill `answer`. Raises OSError when there is no connection to be had, TimeoutError after `timeout_s`."""
        async with asyncio.timeout(timeout_s):
            while True:
                connection = await self._connection()
                was_used = connection.was_used
                try:
                    await connection.exchange(request, answer)
                finally:
                    if answer.end_s and not answer.failure and connection.is_reusable and len(self._idle) < _IDLE_MAX:
                        self._idle.append(connection)
                    else:
                        connection.close()
                if not answer.failure or connection.got_bytes or not was_used:
                    return
                answer.failure = ""  # it had been closed while it lay idle; nothing of this request was answered

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await loop.create_connection(
                    _Connection, self.endpoint.host, self.endpoint.port, ssl=self._tls
                )
        except TimeoutError:
            raise OSError(f"no connection within {_CONNECT_S:.0f} s") from None
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
