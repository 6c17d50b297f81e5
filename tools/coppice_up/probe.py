"""Whether a child answers yet. A probe asks once, briefly, and never raises."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.addresses import Address, is_loopback
from coppice.edge.grpc_tls import open_channel
from coppice.errors import UsageError
from coppice.tls.credentials import Credentials

PROBE_TIMEOUT_S = 1.0

Probe = Callable[[], bool]


def grpc_serving(address: Address, tls: Credentials | None = None) -> Probe:
    """Ready when gRPC health says SERVING for the server as a whole (service "")."""

    def probe() -> bool:
        # Asking the socket first keeps gRPC's reconnection backoff out of the start-up time.
        if not _accepts(address):
            return False
        with open_channel(str(address), tls, (("grpc.enable_http_proxy", 0),)) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=""), timeout=PROBE_TIMEOUT_S
                )
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return probe


def rest_ready(url: str, *, verify: bool = True) -> Probe:
    """Ready when GET /readyz says 200. Certificates are not verified on loopback, where a public name says nothing.

    Raises UsageError when `url` is none of http:// or https:// with a host.
    """
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"{url!r} is no URL of a REST API", hint="such as http://127.0.0.1:8000")

    verify = verify and not is_loopback(host)

    def probe() -> bool:
        if parts.scheme == "http":
            connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
        else:
            context = _context(verify=verify)
            connection = http.client.HTTPSConnection(host, port, timeout=PROBE_TIMEOUT_S, context=context)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    return probe


def _context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:  # nothing secret is sent
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def valkey_answers(address: Address) -> Probe:
    """Ready when a PING is answered."""

    def probe() -> bool:
        try:
            with socket.create_connection((address.host, address.port), timeout=PROBE_TIMEOUT_S) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    return probe


def _accepts(address: Address) -> bool:
    try:
        with socket.create_connection((address.host, address.port), timeout=PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False
