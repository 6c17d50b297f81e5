"""What pages in a browser may make their user's machine send to the admin REST, and clients that are slow there."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from coppice_cache.edge.api.admin_http import AdminServer, build_app
from coppice_cache.edge.api.http_protocol import AdminProtocol
from tests.fakes.cache.cache_ends import Cache

Keep = Callable[[Any], Any]
JSON = {"Content-Type": "application/json"}
EVIL = {"Origin": "http://evil.example"}


@pytest.fixture
def cache(keep: Keep) -> Cache:
    started = keep(Cache())
    assert isinstance(started, Cache)
    return started


@pytest.fixture
def client(cache: Cache) -> Iterator[TestClient]:
    process = cache.process
    app = build_app(process._service, CollectorRegistry(), process._readiness, names=("cache",))
    with closing(TestClient(app, base_url="http://127.0.0.1:8071", raise_server_exceptions=False)) as opened:
        yield opened


def routes(client: TestClient) -> list[tuple[str, str]]:
    """Each method and path of the app, and one that it does not have."""
    found = [
        (method, route.path.replace("{domain:path}", "a").replace("{name:path}", "a"))
        for route in client.app.routes  # type: ignore[attr-defined]
        if isinstance(route, APIRoute)
        for method in sorted(route.methods)
    ]
    assert len(found) > 10
    return [*found, ("GET", "/openapi.json"), ("GET", "/no/such"), ("POST", "/no/such")]


def test_no_route_answers_to_a_name_that_is_not_ours(client: TestClient) -> None:
    for method, path in routes(client):
        for host in ("evil.example", "evil.example:8071", "127.0.0.1.evil.example", "localhost.evil.example", ""):
            said = client.request(method, path, headers={**JSON, "Host": host})
            assert (said.status_code, said.json()["error"]["code"]) == (400, "unknown_host"), (method, path, host)


@pytest.mark.parametrize("host", ["LOCALHOST:8071", "127.0.0.1:8071", "10.1.2.3", "[::1]:8071", "cache:8071"])
def test_addresses_and_the_names_of_the_operator_are_answered_to(client: TestClient, host: str) -> None:
    assert client.get("/v1/stats", headers={"Host": host}).status_code == 200


def test_no_route_but_a_question_takes_what_a_page_sends(client: TestClient) -> None:
    """A page's script or form: with its origin, or with a body that a form can name."""
    asked = [(method, path) for method, path in routes(client) if method not in ("GET", "HEAD")]
    assert {path for _, path in asked} > {"/v1/explain", "/v1/audit", "/v1/invalidate", "/v1/pins/a"}
    for method, path in asked:
        for headers in (
            {**JSON, **EVIL},
            {**JSON, "Origin": "null"},
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/x-www-form-urlencoded"},
            {},
        ):
            said = client.request(method, path, content=b"{}", headers=headers)
            assert (said.status_code, said.json()["error"]["code"]) == (403, "foreign_origin"), (method, path, headers)


# ---- slow clients


class Impatient(AdminProtocol):
    patience_s = 0.2


@pytest.fixture
def port(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """An admin listener of little patience."""
    monkeypatch.setattr("coppice_cache.edge.api.admin_http.AdminProtocol", Impatient)
    process = cache.process
    server = AdminServer("127.0.0.1", 0)
    server.start(build_app(process._service, CollectorRegistry(), process._readiness))
    yield server.port
    server.stop()


HEAD = b"POST /v1/explain HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


HALF_A_BODY = HEAD + b"Content-Length: 100\r\n\r\n{"


@pytest.mark.parametrize(
    ("sent", "before"),
    [(b"", False), (HEAD, False), (HALF_A_BODY, False), (HEAD, True), (HALF_A_BODY, True)],
    ids=["nothing", "half of the headers", "half of the body", "half of the next headers", "half of the next body"],
)
def test_a_client_that_does_not_send_its_request_is_let_go(port: int, sent: bytes, before: bool) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
        if before:
            slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200")
        slow.sendall(sent)
        try:
            while data := slow.recv(1 << 16):
                assert b"HTTP/1.1" not in data
        except ConnectionResetError:
            pass


def test_a_client_that_sends_it_in_time_is_answered(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        body = json.dumps({"domain": "default", "tokens": [1]}).encode()
        client.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        client.sendall(body)
        assert b"HTTP/1.1" in client.recv(1 << 16)


def test_a_client_that_does_not_read_its_answers_is_let_go(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Event()

    def connection_lost(self: Impatient, error: Exception | None) -> None:
        AdminProtocol.connection_lost(self, error)
        gone.set()

    monkeypatch.setattr(Impatient, "connection_lost", connection_lost)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        assert gone.wait(30)
