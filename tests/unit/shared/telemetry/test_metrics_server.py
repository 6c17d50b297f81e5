"""The metrics server answers whom it may, and keeps few threads for those who say nothing."""

from __future__ import annotations

import http.client
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from coppice.errors import UnavailableError
from coppice.telemetry.metrics_server import (
    CONNECTIONS_MAX,
    PEER_CONNECTIONS_MAX,
    MetricsServer,
    Page,
    serve_metrics,
)
from coppice.tls.credentials import Credentials
from tests.fakes.certificates import Authority
from tests.fakes.waiting import WAIT_S, wait_for


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_metrics_server_says_what_is_missing() -> None:
    registry = CollectorRegistry()
    Gauge("coppice_test_blocks", "Blocks.", registry=registry).set(3)
    reasons = ["not registered with the cache service"]
    server = serve_metrics("127.0.0.1", 0, registry, lambda: reasons)
    try:
        assert "coppice_test_blocks 3.0" in get(server.port, "/metrics")[1]
        assert get(server.port, "/healthz")[0] == 200
        assert get(server.port, "/readyz") == (503, "not registered with the cache service\n")
        reasons.clear()
        assert get(server.port, "/readyz") == (200, "ready\n")
        assert get(server.port, "/readyz", "HEAD") == (200, "")
        assert get(server.port, "/nope")[0] == 404
        with pytest.raises(UnavailableError, match=f"127.0.0.1:{server.port}"):
            serve_metrics("127.0.0.1", server.port, registry, list)
    finally:
        server.close()


def test_exemplars_are_for_whoever_asks_for_openmetrics() -> None:
    plain, rich = CollectorRegistry(), CollectorRegistry()
    Histogram("coppice_test_seconds", "Times.", registry=plain).observe(0.3)
    Histogram("coppice_test_seconds", "Times.", registry=rich).observe(0.3, {"trace_id": "abc"})
    server = serve_metrics("127.0.0.1", 0, plain, list, exemplars=rich)
    accepted = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"  # as Prometheus does
    try:
        assert "# EOF" not in get(server.port, "/metrics")[1]
        request = Request(f"http://127.0.0.1:{server.port}/metrics", headers={"Accept": accepted})
        with urlopen(request, timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
            (family,) = text_string_to_metric_families(answer.read().decode())
        assert [one.exemplar.labels for one in family.samples if one.exemplar] == [{"trace_id": "abc"}]
    finally:
        server.close()


CONSOLE = "http://127.0.0.1:8071"


def headers_of(port: int, path: str, origin: str | None, method: str = "GET") -> http.client.HTTPMessage:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={} if origin is None else {"Origin": origin})
        return connection.getresponse().headers
    finally:
        connection.close()


def test_scripts_of_the_console_read_pages_and_nothing_else() -> None:
    def pages(path: str, query: str) -> Page | None:
        return Page(404 if path == "/requests/a" else 200, b"{}", "application/json") if "requests" in path else None

    allowed = "Access-Control-Allow-Origin"
    server = serve_metrics(
        "127.0.0.1", 0, CollectorRegistry(), tuple, pages=pages, origins=(CONSOLE, "http://localhost:8071")
    )
    try:
        for path in ("/requests", "/requests/a", "/requests?limit=3"):
            found = headers_of(server.port, path, CONSOLE)
            assert (found[allowed], found["Access-Control-Allow-Credentials"], found["Vary"]) == (
                CONSOLE,
                "true",
                "Origin",
            )
            others = (
                "http://127.0.0.1:8072",
                "http://127.0.0.1",
                "https://127.0.0.1:8071",
                "null",
                "*",
                f"{CONSOLE}, {CONSOLE}",
            )
            for origin in (*others, None):
                found = headers_of(server.port, path, origin)
                assert (found[allowed], found["Vary"]) == (None, "Origin"), (path, origin)
            for method in ("HEAD", "OPTIONS", "POST"):
                assert headers_of(server.port, path, CONSOLE, method)[allowed] is None, (path, method)
        for path in ("/metrics", "/healthz", "/readyz", "/nope"):
            assert headers_of(server.port, path, CONSOLE)[allowed] is None, path
    finally:
        server.close()


def test_without_origins_no_script_reads_anything() -> None:
    server = serve_metrics(
        "127.0.0.1", 0, CollectorRegistry(), tuple, pages=lambda *_: Page(200, b"{}", "application/json")
    )
    try:
        for origin in (CONSOLE, "", "null"):
            assert headers_of(server.port, "/requests", origin)["Access-Control-Allow-Origin"] is None
    finally:
        server.close()


def test_with_tls_metrics_are_for_whoever_has_a_certificate_of_the_stack(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "others").mkdir()
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    server = serve_metrics("127.0.0.1", 0, CollectorRegistry(), tuple, tls=ours.credentials("worker", "w0"))

    def status(context: ssl.SSLContext) -> int:
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=60)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    try:
        silent = socket.create_connection(("127.0.0.1", server.port))
        assert status(ours.credentials("monitor", "p").client_context()) == 200, "nobody waits for the silent one"
        nobody = ssl.create_default_context(cafile=tmp_path / "ours" / "ca.pem")
        nobody.check_hostname = False
        assert status(nobody) == 0
        stranger = others.credentials("monitor", "prometheus").client_context()
        stranger.load_verify_locations(tmp_path / "ours" / "ca.pem")
        assert status(stranger) == 0
        with pytest.raises((OSError, http.client.HTTPException)):
            get(server.port, "/readyz")
        silent.close()
    finally:
        server.close()


# ---- who connects and does not go on ----

FOREVER_S = 3600.0


@contextmanager
def serving(*, patience_s: float = FOREVER_S, tls: Credentials | None = None) -> Iterator[MetricsServer]:
    server = serve_metrics("127.0.0.1", 0, CollectorRegistry(), tuple, tls=tls, patience_s=patience_s)
    try:
        yield server
    finally:
        server.close()


def connect(server: MetricsServer, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S, source_address=(source, 0))


def is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def is_served(server: MetricsServer) -> bool:
    try:
        return get(server.port, "/healthz")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def test_connections_beyond_those_of_one_address_are_closed_at_once() -> None:
    with serving() as server, ExitStack() as open_:
        silent = [open_.enter_context(connect(server)) for _ in range(PEER_CONNECTIONS_MAX)]
        assert is_cut(open_.enter_context(connect(server)))
        silent.pop().close()
        wait_for(lambda: is_served(server), "one that came when there was room")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback is one address")
def test_connections_beyond_those_of_all_are_closed_at_once() -> None:
    with serving() as server, ExitStack() as open_:
        for number in range(CONNECTIONS_MAX):
            open_.enter_context(connect(server, f"127.0.0.{number // PEER_CONNECTIONS_MAX + 2}"))
        assert is_cut(open_.enter_context(connect(server)))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback is one address")
def test_one_address_does_not_keep_others_out() -> None:
    with serving() as server, ExitStack() as open_:
        kept = [open_.enter_context(connect(server, "127.0.0.2")) for _ in range(CONNECTIONS_MAX)]
        assert all(is_cut(connection) for connection in kept[PEER_CONNECTIONS_MAX:])
        assert is_served(server)


CLIENT_HELLO = b"\x16\x03\x01\x3f\xff\x01\x00\x3f\xfb\x03\x03"  # how a long one begins


@pytest.mark.parametrize(
    ("with_tls", "begins"), [(False, b"GET /"), (True, CLIENT_HELLO)], ids=["request", "handshake"]
)
def test_who_says_a_byte_now_and_then_is_cut_when_its_time_is_up(tmp_path: Path, with_tls: bool, begins: bytes) -> None:
    tls = Authority(tmp_path).credentials("worker", "w0") if with_tls else None
    with serving(patience_s=0.5, tls=tls) as server, connect(server) as slow:
        slow.sendall(begins)
        slow.settimeout(0.05)
        wait_for(lambda: is_cut_after_a_byte(slow), "its end")


def is_cut_after_a_byte(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"\0")
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_thread_that_waits_for_a_request_over_tls_is_woken_when_time_is_up(tmp_path: Path) -> None:
    tls = Authority(tmp_path).credentials("worker", "w0")
    with serving(tls=tls) as server, tls.client_context().wrap_socket(connect(server)) as secured:
        secured.sendall(b"GET /")
        (one,) = server._server._open.values()
        one.until_s = 0.0
        assert is_cut(secured)
        wait_for(lambda: not server._server._open, "its place is free")


def test_a_connection_is_for_one_request() -> None:
    with serving() as server, connect(server) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        assert answer.count(b"HTTP/1.1 200") == 1
