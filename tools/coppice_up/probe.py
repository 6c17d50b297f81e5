"""Whether a child answers yet. A probe asks once, briefly, and never raises."""

from __future__ import annotations

import socket
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.addresses import Address
from coppice.edge.grpc_tls import open_channel
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
