"""One way to start a gRPC server: limits, keepalive, health with Watch, reflection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coppice.addresses import PortInUse

CONTROL_MESSAGE_BYTES_MAX = 64 * 1024 * 1024  # a tree that is told, or a prompt
STREAMS_MAX = 128  # every open stream keeps one thread

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", CONTROL_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", CONTROL_MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", CONTROL_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", CONTROL_MESSAGE_BYTES_MAX),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # two servers on one port are an error, not a lottery
)


class GrpcServer:
    """A threaded gRPC server with health and reflection. Not serving until `set_ready(True)`."""

    def __init__(
        self, address: str, services: Sequence[str], register: Callable[[grpc.Server], None] | None, name: str
    ) -> None:
        self._pool = ThreadPoolExecutor(STREAMS_MAX, thread_name_prefix=f"grpc {name}")
        self._server = grpc.server(self._pool, options=SERVER_OPTIONS)
        self._services = ("", *services)
        self._health = health.HealthServicer(
            experimental_non_blocking=True, experimental_thread_pool=ThreadPoolExecutor(4)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.set_ready(False)
        if register is not None:
            register(self._server)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise PortInUse(f"cannot listen on {address}: is another process using that port?") from error

    def add(self, register: Callable[[grpc.Server], None]) -> None:
        """Add servicers that need to know the port; before `start`."""
        register(self._server)

    def start(self) -> None:
        self._server.start()

    def set_ready(self, ready: bool) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            self._health.set(service, serving)

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, then end them."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait()
        self._pool.shutdown(wait=False, cancel_futures=True)
