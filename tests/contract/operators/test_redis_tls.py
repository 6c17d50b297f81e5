"""A Redis that is reached over TLS, with the certificate that deploy/make-secrets makes for it."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.cache.cache_ends import Cache, FakeWorker
from tests.fakes.ports import valkey_server
from tests.fakes.waiting import wait_for
from tests.unit.repository.test_deploy_files import make_secrets

Keep = Callable[[Any], Any]


class TlsRelay:
    """TLS on `port`, plain to `target_port`: the server of the tests is built without TLS."""

    def __init__(self, folder: Path, target_port: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._wait(asyncio.start_server(self._relay, "127.0.0.1", 0, ssl=self._context))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _wait(self, started: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(started, self._loop).result(timeout=10)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer), return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.fixture
def made(tmp_path: Path) -> Path:
    make_secrets(tmp_path)
    return tmp_path / "tls"


@pytest.fixture
def port(made: Path, keep: Keep) -> int:
    server = keep(valkey_server())
    server.start()
    relay: TlsRelay = keep(TlsRelay(made / "redis", server.port))
    return relay.port


def url(port: int, ca: Path, *, compares_names: bool = False) -> str:
    return f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={ca}&ssl_check_hostname={compares_names}"


def reasons(cache: Cache) -> str:
    return " ".join(cache.rest("/readyz")[1]["reasons"])


def test_a_cache_uses_redis_over_tls(made: Path, port: int, keep: Keep) -> None:
    cache = keep(Cache(redis_url=url(port, made / "cache" / "ca.pem")))
    keep(FakeWorker(cache)).wait_registered()
    wait_for(lambda: "coppice_cache_recovery_log_age_seconds" in str(cache.rest("/metrics")[1]), "the recovery log")
    assert not reasons(cache)


def test_a_redis_of_another_ca_is_not_spoken_to(made: Path, port: int, keep: Keep, tmp_path: Path) -> None:
    make_secrets(tmp_path / "others")
    cache = keep(Cache(redis_url=url(port, tmp_path / "others" / "tls" / "ca.pem")))
    wait_for(lambda: "certificate verify failed" in reasons(cache), "a reason")


def test_a_redis_of_another_name_is_not_spoken_to(made: Path, port: int, keep: Keep) -> None:
    """Its certificate is for `redis`, the name in the compose file, and not for loopback."""
    cache = keep(Cache(redis_url=url(port, made / "ca.pem", compares_names=True)))
    wait_for(lambda: "not valid for '127.0.0.1'" in reasons(cache), "a reason")
