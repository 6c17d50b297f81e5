"""Attacks by connections: opened, sent some bytes or none, never read; and by handshakes that lead nowhere."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import ssl
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from benchmarks.attacks.over_rest import NUM_BYTES
from coppice_bench.stack import MODEL_NAME

if TYPE_CHECKING:
    from benchmarks.attacks.attacker import Target

_CONNECTIONS = 10_000
_OPENING = 50  # at once
_PAUSE_S = 0.2
_LOOK_S = 1.0
_READ_S = 0.05
_HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n\r\n"
_STATUS_BYTES = len(b"HTTP/1.1 200")


async def bodies(target: Target, told: Counter[str]) -> None:
    """That lack their end."""
    head = _HEAD.format(target.key, NUM_BYTES + 100_000).encode()
    await _hold(150, head + b'{"prompt":"' + b"x" * NUM_BYTES, target, told)


async def full(target: Target, told: Counter[str]) -> None:
    """Streams, as many as a tenant may have answers at work. They are read: no attack."""
    await _hold(64, _streamed(target), target, told, reads=True)


async def unread(target: Target, told: Counter[str]) -> None:
    """The same, and nothing is read."""
    await _hold(64, _streamed(target), target, told)


def _streamed(target: Target) -> bytes:
    body = {"model": MODEL_NAME, "prompt": "x", "n": 4, "max_tokens": 400, "stream": True, "ignore_eos": True}
    raw = json.dumps(body).encode()
    return _HEAD.format(target.key, len(raw)).encode() + raw


async def idle(target: Target, told: Counter[str]) -> None:
    """Connections that say nothing: no request, and under TLS no hello. As many as there may be files open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    await _hold(min(_CONNECTIONS, soft - 100), b"", target, told)


async def hellos(target: Target, told: Counter[str]) -> None:
    """Handshakes to their end, for each of which the server signs; nothing is asked then."""
    context = ssl.create_default_context(cafile=target.ca)

    async def again_and_again() -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection(target.host, target.port, ssl=context)
                told["shaken"] += 1
                writer.transport.abort()
            except OSError:
                told["refused"] += 1
                await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(*(again_and_again() for _ in range(64)))


async def _hold(count: int, raw: bytes, target: Target, told: Counter[str], *, reads: bool = False) -> None:
    """So many connections that send this and read nothing, or all; another for each that the server closes."""
    look, look_s = (_taken, _READ_S) if reads else (_peeked, _LOOK_S)
    opening = asyncio.Semaphore(_OPENING)
    loop = asyncio.get_running_loop()

    async def keep_one() -> None:
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            async with opening:
                await loop.sock_connect(connection, (target.host, target.port))
            await loop.sock_sendall(connection, raw)
            told["held"] += 1
            is_answered = False
            while (said := look(connection)) != b"":
                if said and not is_answered:
                    told[f"answered {said[-3:].decode(errors='replace')}"] += 1
                    is_answered = True
                await asyncio.sleep(look_s)
            told["closed"] += 1

    async def again_and_again() -> None:
        while True:
            try:
                await keep_one()
            except OSError:
                told["refused"] += 1
                await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(*(again_and_again() for _ in range(count)))


def _peeked(connection: socket.socket) -> bytes | None:
    """The first bytes that came, None while nothing has; empty when the other end has closed. They stay unread."""
    try:
        return connection.recv(_STATUS_BYTES, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""


def _taken(connection: socket.socket) -> bytes | None:
    """The same, and all is read."""
    said = _peeked(connection)
    with suppress(OSError):  # there is no more now
        while said and connection.recv(1 << 16):
            pass
    return said
