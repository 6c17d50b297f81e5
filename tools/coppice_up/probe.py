"""Whether a child answers yet. A probe asks once, briefly; it is a value, so that another machine can ask."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.addresses import Address, is_loopback
from coppice.edge.grpc_tls import open_channel
from coppice.errors import UsageError
from coppice.tls.credentials import Credentials, TlsFiles

PROBE_TIMEOUT_S = 1.0

Probe = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class GrpcServing:
    """Ready when gRPC health says SERVING for the server as a whole (service ""). `tls`: files to say who asks."""

    address: Address
    tls: TlsFiles | None = None

    def __call__(self) -> bool:
        # Asking the socket first keeps gRPC's reconnection backoff out of the start-up time.
        if not _accepts(self.address):
            return False
        credentials = None if self.tls is None else Credentials(self.tls)
        with open_channel(str(self.address), credentials, (("grpc.enable_http_proxy", 0),)) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=""), timeout=PROBE_TIMEOUT_S
                )
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass(frozen=True, slots=True)
class RestReady:
    """Ready when GET /readyz says 200. Certificates are not verified on loopback, where a public name says nothing.

    Raises UsageError when `url` is none of http:// or https:// with a host.
    """

    url: str
    verify: bool = True

    def __post_init__(self) -> None:
        self._host_and_port()

    def __call__(self) -> bool:
        host, port = self._host_and_port()
        if self.url.startswith("http:"):
            connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
        else:
            context = _context(verify=self.verify and not is_loopback(host))
            connection = http.client.HTTPSConnection(host, port, timeout=PROBE_TIMEOUT_S, context=context)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _host_and_port(self) -> tuple[str, int | None]:
        parts = urlsplit(self.url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if parts.scheme not in ("http", "https") or not host:
            raise UsageError(f"{self.url!r} is no URL of a REST API", hint="such as http://127.0.0.1:8000")
        return host, port


def _context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:  # nothing secret is sent
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


@dataclass(frozen=True, slots=True)
class Runs:
    """Ready when it runs: a node of a worker, of which the worker's first one says whether it computes."""

    def __call__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class ValkeyAnswers:
    """Ready when a PING is answered."""

    address: Address

    def __call__(self) -> bool:
        try:
            with socket.create_connection(
                (self.address.host, self.address.port), timeout=PROBE_TIMEOUT_S
            ) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


def _accepts(address: Address) -> bool:
    try:
        with socket.create_connection((address.host, address.port), timeout=PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False
