"""REST over TLS: the same API; who does not shake hands takes nobody's place for long."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from coppice.errors import UsageError
from coppice.tls.entrance import Handshakes, TlsEntrance
from coppice_rpc.v1 import scheduler_pb2_grpc as pb_grpc
from coppice_scheduler.edge.base.public_tls import PublicTls
from coppice_scheduler.edge.base.settings import ServiceSettings
from tests.fakes.api import grpc_served
from tests.fakes.api.engine import Script
from tests.fakes.api.rest import MODEL, WAIT_S, Served, read_until_closed, serving
from tests.fakes.certificates import Authority, replace
from tests.fakes.waiting import wait_for

Files = tuple[Path, Path, Path]
CLIENT_HELLO = b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb\x03\x03"  # how a long one begins


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def files(authority: Authority) -> Files:
    return (*authority.public("127.0.0.1", "localhost"), authority.folder / "ca.pem")


@pytest.fixture
def served(files: Files) -> Iterator[Served]:
    with serving(tls=files) as served:
        yield served


def secured(served: Served, files: Files, connection: socket.socket | None = None) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=files[2])
    return context.wrap_socket(connection or served.connect(), server_hostname="127.0.0.1")


def test_the_openai_client_whole_and_streamed(served: Served) -> None:
    served.says("Grüße aus 東京!")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", http_client=served.http)
    messages = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[arg-type]
    assert whole.choices[0].message.content == "Grüße aus 東京!"
    stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True)  # type: ignore[arg-type]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Grüße aus 東京!"


def test_a_client_that_does_not_know_the_ca_refuses_us(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{served.url}/healthz")
    assert served.http.get("/healthz").status_code == 200
    assert not caplog.records, "anybody could fill the log"


def test_old_versions_and_plain_http_are_refused(served: Served, files: Files) -> None:
    context = ssl.create_default_context(cafile=files[2])
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    with context.wrap_socket(served.connect(), server_hostname="127.0.0.1") as older:
        assert older.version() == "TLSv1.2"
    with secured(served, files) as newest:
        assert newest.version() == "TLSv1.3"
    with served.connect() as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in read_until_closed(plain)


def test_what_comes_with_the_last_bytes_of_the_handshake_is_read(served: Served, files: Files) -> None:
    """A client of TLS 1.3 may send its request in the same packet."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=files[2]).wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with served.connect() as connection:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(65536))
        client.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        connection.sendall(outgoing.read())
        answer = b""
        while b"\r\n" not in answer:
            incoming.write(connection.recv(65536))
            with suppress(ssl.SSLWantReadError):  # what came are tickets of the session
                answer += client.read(65536)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


def test_who_does_not_shake_hands_is_cut(files: Files) -> None:
    with serving(tls=files, max_connections=2, handshake_timeout_s=1.0, header_timeout_s=1.0) as served:
        with served.connect() as slow, served.connect() as silent:
            slow.sendall(CLIENT_HELLO)
            assert read_until_closed(slow) == b""
            assert read_until_closed(silent) == b""

        def is_served() -> bool:
            """On a busy machine hands may take longer than they may here."""
            try:
                return served.http.get("/healthz").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(is_served, "a client to be served")


def test_hundreds_of_slow_handshakes_are_few_and_keep_nobody_out(files: Files) -> None:
    """The oldest make room. Who has said nothing is at no handshake."""
    forever = {"handshake_timeout_s": 3600.0, "header_timeout_s": 3600.0}
    with (
        serving(tls=files, max_handshakes=16, **forever) as served,
        secured(served, files) as kept,
        ExitStack() as open_,
    ):
        silent, *slow = [open_.enter_context(served.connect()) for _ in range(301)]
        for connection in slow:
            connection.sendall(CLIENT_HELLO)
        assert served.http.get("/healthz").status_code == 200
        cut = [connection for connection in slow if is_closed(connection)]
        assert len(cut) >= len(slow) - 16, "the others may be at it"
        with secured(served, files, silent) as late:
            late.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert late.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
        kept.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n"), "whoever has shaken hands stays"


def is_closed(connection: socket.socket) -> bool:
    """By the other end, which sent nothing before."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_connections_of_http_count_with_them(files: Files) -> None:
    with serving(tls=files, max_connections=1, excess_connections=0) as served, secured(served, files) as kept:
        kept.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
        with served.connect() as beyond:
            assert read_until_closed(beyond) == b""
        kept.sendall(b"\r\n")
        assert kept.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_client_that_does_not_read_loses_its_connection(files: Files) -> None:
    with serving(tls=files, write_timeout_s=0.5) as served:
        endless = served.ids(" forest" * 200)
        served.engine.script = lambda request: Script((endless * 100)[: request.max_new_tokens])
        body = json.dumps({"model": MODEL, "prompt": ["x"] * 100, "max_tokens": 500, "stream": True}).encode()
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(("127.0.0.1", served.port))
        with secured(served, files, plain) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert served.engine.some_cancelled.wait(WAIT_S)


def test_a_client_that_goes_away_ends_its_request(served: Served, files: Files) -> None:
    served.says("", hangs=True)
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    with secured(served, files) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert served.engine.some_hanging.wait(WAIT_S)
    assert served.engine.some_cancelled.wait(WAIT_S)


def test_a_renewed_certificate_is_shown_to_new_connections(
    served: Served, files: Files, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    def shown() -> bytes | None:
        with secured(served, files) as connection:
            return connection.getpeercert(binary_form=True)

    first = shown()
    with secured(served, files) as kept:
        replace(files[1], b"half a ke")
        assert shown() == first
        authority.public("127.0.0.1")
        assert shown() != first
        kept.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert kept.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n"), "open connections stay"
    assert caplog.text.count("the old ones stay") == 1


def test_a_server_that_ends_does_not_wait_for_hands(files: Files) -> None:
    async def end() -> None:
        connections: set[TlsEntrance] = set()
        handshakes = Handshakes(PublicTls(*files[:2]).channel, 1, timeout_s=3600.0)

        def entrance() -> TlsEntrance:
            return TlsEntrance(asyncio.Protocol, connections, handshakes)

        server = await asyncio.get_running_loop().create_server(entrance, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            while not connections:
                await asyncio.sleep(0.01)
            (silent,) = connections
            silent.shutdown()
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            assert not connections
            writer.close()

    asyncio.run(end())


def test_grpc_over_tls_and_a_renewed_certificate(authority: Authority, files: Files) -> None:
    async def test(served: grpc_served.Served) -> None:
        served.says("forest")
        assert await served.ask()
        address = f"127.0.0.1:{served.port}"
        first = ssl.get_server_certificate(("127.0.0.1", served.port))
        authority.public("127.0.0.1")
        assert ssl.get_server_certificate(("127.0.0.1", served.port)) != first
        async with grpc.aio.insecure_channel(address) as plain:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await replace_channel(served, plain).ask()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    grpc_served.serve(test, tls=files)


def replace_channel(served: grpc_served.Served, channel: grpc.aio.Channel) -> grpc_served.Served:
    return dataclasses.replace(served, channel=channel, stub=pb_grpc.GenerationStub(channel))


def test_files_that_are_wrong_are_told(authority: Authority, files: Files, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(UsageError, match=r"nowhere\.pem cannot be read: No such file"):
        PublicTls(authority.folder / "nowhere.pem", files[1])
    other = authority.public("localhost", stem="other")
    with pytest.raises(UsageError, match=r"other-key\.pem is not the key of"):
        PublicTls(files[0], other[1])
    with pytest.raises(ValueError, match="belong together"):
        ServiceSettings(model="m", ssl_certfile="a")
    assert ServiceSettings(model="m").public_tls() is None
    assert ServiceSettings(model="m", ssl_certfile="", ssl_keyfile="").public_tls() is None
