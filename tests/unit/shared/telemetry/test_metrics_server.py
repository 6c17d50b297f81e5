"""The metrics server answers whom it may."""

from __future__ import annotations

import http.client
import socket
import ssl
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from coppice.errors import UnavailableError
from coppice.telemetry.metrics_server import serve_metrics
from tests.fakes.certificates import Authority


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
