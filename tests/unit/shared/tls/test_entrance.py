"""TLS of an asyncio server: few bytes for each connection; what is said arrives whole, and in order; ends are ends."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from coppice.tls.channel import TlsChannel
from coppice.tls.credentials import Credentials
from coppice.tls.entrance import Handshakes, TlsEntrance
from coppice.tls.identity import identity_of
from tests.fakes.certificates import Authority
from tests.fakes.waiting import WAIT_S

KIB = 1024
FOREVER_S = 3600.0
HALF_A_HELLO = b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb\x03\x03"
Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def tls(tmp_path: Path) -> Credentials:
    return Authority(tmp_path).credentials("cache", "c0")


class Echo(asyncio.Protocol):
    """Says again what it hears. It counts itself, as protocols of HTTP do."""

    def __init__(self, connections: set[Any]) -> None:
        self._connections = connections
        self.was_paused = self.is_lost = False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"bye"):
            self.transport.write(b"farewell")
            self.transport.close()
        self.transport.write(data)

    def pause_writing(self) -> None:
        self.was_paused = True
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self.is_lost = True

    def shutdown(self) -> None:
        self.transport.abort()


class Served:
    """A listener with this entrance. `made`: what it has made for those who shook hands."""

    def __init__(self, tls: Credentials, **bounds: Any) -> None:
        self.tls = tls
        self.made: list[Echo] = []
        self.connections: set[Any] = set()
        options = {"connections_max": 1000, "timeout_s": FOREVER_S, **bounds}
        self.handshakes = Handshakes(lambda: tls.channel(is_server=True), **options)

    async def run(self, test: Callable[[Served], Awaitable[None]]) -> None:
        def entrance() -> TlsEntrance:
            return TlsEntrance(self._echo, self.connections, self.handshakes)

        listener = await asyncio.get_running_loop().create_server(entrance, "127.0.0.1", 0)
        self._port = listener.sockets[0].getsockname()[1]
        async with listener:
            async with asyncio.timeout(WAIT_S):
                await test(self)
            for connection in list(self.connections):
                connection.shutdown()

    def _echo(self) -> Echo:
        self.made.append(Echo(self.connections))
        return self.made[-1]

    async def connect(self, context: ssl.SSLContext | None = None) -> Opened:
        """Without a context: and say nothing."""
        return await asyncio.open_connection("127.0.0.1", self._port, ssl=context)

    async def shake_hands(self) -> Opened:
        return await self.connect(self.tls.client_context())


async def until(look: Callable[[], Any]) -> None:
    while not look():
        await asyncio.sleep(0.01)


def serve(tls: Credentials, test: Callable[[Served], Awaitable[None]], **bounds: Any) -> None:
    asyncio.run(Served(tls, **bounds).run(test))


# ---- what connections cost ----


@pytest.mark.parametrize("says", [b"", HALF_A_HELLO], ids=["silent", "half a hello"])
def test_connections_that_do_not_shake_hands_take_little_memory(tls: Credentials, says: bytes) -> None:
    async def test(served: Served) -> None:
        before = memory()
        opened = [await served.connect() for _ in range(300)]
        for _, writer in opened:
            writer.write(says)
        await until(lambda: len(served.handshakes.under_way) == 300)
        if says:
            await until(lambda: all(entrance._channel for entrance in served.handshakes.under_way))
        assert (memory() - before) / 300 < 64 * KIB, "of both ends"
        for _, writer in opened:
            writer.close()
        await until(lambda: not served.connections)
        assert not served.handshakes.under_way

    with_memory_traced(lambda: serve(tls, test))


def test_connections_that_shook_hands_take_little_memory(tls: Credentials) -> None:
    """The clients here are not asyncio's, which would take as much as its servers."""

    async def test(served: Served) -> None:
        before = memory()
        opened = []
        for _ in range(100):
            reader, writer = await served.connect()
            opened.append((writer, await handshake(tls, reader, writer)))
        await until(lambda: len(served.made) == 100)
        assert (memory() - before) / 100 < 96 * KIB, "of both ends"
        for writer, _ in opened:
            writer.close()

    with_memory_traced(lambda: serve(tls, test))


async def handshake(tls: Credentials, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> TlsChannel:
    channel = tls.channel(is_server=False)
    while not channel.shake_hands():
        writer.write(channel.outgoing())
        channel.feed(await reader.read(65536))
    writer.write(channel.outgoing())
    return channel


def memory() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def with_memory_traced(act: Callable[[], None]) -> None:
    tracemalloc.start()
    try:
        act()
    finally:
        tracemalloc.stop()


# ---- who has no place ----


def test_the_oldest_that_did_not_shake_hands_makes_room(tls: Credentials) -> None:
    async def test(served: Served) -> None:
        first, second, third = [await served.connect() for _ in range(3)]
        assert await first[0].read() == b""
        assert set(served.connections) == set(served.handshakes.under_way)
        assert len(served.connections) == 2
        _, kept = await served.shake_hands()
        assert await second[0].read() == b""
        for writer in (kept, third[1]):
            writer.close()

    serve(tls, test, handshakes_max=2)


def test_who_has_shaken_hands_makes_no_room(tls: Credentials) -> None:
    async def test(served: Served) -> None:
        reader, writer = await served.shake_hands()
        await until(lambda: served.made)
        beyond, _ = await served.connect()
        assert await beyond.read() == b""
        writer.write(b"still here")
        assert await reader.readexactly(10) == b"still here"
        writer.close()

    serve(tls, test, connections_max=1)


def test_who_takes_too_long_is_cut(tls: Credentials) -> None:
    async def test(served: Served) -> None:
        reader, writer = await served.connect()
        writer.write(HALF_A_HELLO)
        assert await reader.read() == b""
        assert not served.connections

    serve(tls, test, timeout_s=0.05)


def test_who_says_no_tls_is_cut_and_who_says_an_old_one_is_told_why(tls: Credentials) -> None:
    async def test(served: Served) -> None:
        reader, writer = await served.connect()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.read() == b""
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError, match="ALERT_PROTOCOL_VERSION"):
            await served.connect(old)
        assert not served.made

    serve(tls, test)


# ---- what is said ----


def test_what_is_said_arrives_whole_and_slow_readers_are_waited_for(tls: Credentials) -> None:
    said = bytes(range(256)) * 16 * KIB  # 4 MiB

    async def test(served: Served) -> None:
        reader, writer = await served.shake_hands()
        await until(lambda: served.made)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        served.made[0].transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        writer.write(said)
        await until(lambda: served.made[0].was_paused)
        assert await reader.readexactly(len(said)) == said
        writer.close()

    serve(tls, test)


def test_the_protocol_knows_whom_it_speaks_to(tls: Credentials) -> None:
    async def test(served: Served) -> None:
        _, writer = await served.shake_hands()
        await until(lambda: served.made)
        transport = served.made[0].transport
        assert identity_of(transport.get_extra_info("peercert")) == tls.identity
        assert transport.get_extra_info("peername") == writer.get_extra_info("sockname")
        assert transport.get_extra_info("sslcontext")
        assert transport.get_extra_info("no such thing", 5) == 5
        transport.max_size = 1000
        assert transport._plain.max_size == transport.max_size == 1000, "of what is read at once"
        writer.close()

    serve(tls, test)


def test_a_server_that_closes_says_so(tls: Credentials) -> None:
    """What it said before arrives, and a farewell of TLS, without which it might have been cut off."""

    async def test(served: Served) -> None:
        reader, writer = await served.connect()
        client = await handshake(tls, reader, writer)
        writer.write(client.sealed(b"bye"))
        client.feed(await reader.read())
        assert client.read() == b"farewell"
        assert client.heard_farewell
        await until(lambda: served.made[0].is_lost)

    serve(tls, test)


@pytest.mark.parametrize("with_farewell", [True, False])
def test_a_client_that_goes_away_is_heard_of(tls: Credentials, with_farewell: bool) -> None:
    async def test(served: Served) -> None:
        reader, writer = await served.connect()
        client = await handshake(tls, reader, writer)
        await until(lambda: served.made)
        if with_farewell:
            client.say_farewell()
            writer.write(client.outgoing())
        else:
            writer.close()
        await until(lambda: served.made[0].is_lost)
        served.made[0].transport.write(b"too late")
        assert not served.connections

    serve(tls, test)


def test_garbage_after_the_handshake_ends_the_connection(tls: Credentials) -> None:
    async def test(served: Served) -> None:
        reader, writer = await served.connect()
        await handshake(tls, reader, writer)
        writer.write(b"no record of TLS at all")
        await until(lambda: served.made and served.made[0].is_lost)

    serve(tls, test)
