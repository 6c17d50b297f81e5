"""Calls that say nothing, at a gRPC server with threads: they keep none that another call needs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.edge.grpc_server import CALLS, CHANNEL_OPTIONS, CONNECTION_STREAMS_MAX, HEALTH_CALLS, GrpcServer
from tests.fakes.waiting import WAIT_S, wait_for

WATCH = "/grpc.health.v1.Health/Watch"
METHODS = (
    "/test/unary_unary",
    "/test/unary_stream",
    "/test/stream_unary",
    "/test/stream_stream",
    "/grpc.health.v1.Health/Check",
    WATCH,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)


def add_echoes(server: grpc.Server) -> None:
    """One method of each kind, which answers with what was said."""

    def whole(said: Any, context: Any) -> bytes:
        return said if isinstance(said, bytes) else b"".join(said)

    def parts(said: Any, context: Any) -> Iterator[bytes]:
        yield from [said] if isinstance(said, bytes) else said

    handlers: dict[str, Any] = {
        "unary_unary": grpc.unary_unary_rpc_method_handler(whole),
        "unary_stream": grpc.unary_stream_rpc_method_handler(parts),
        "stream_unary": grpc.stream_unary_rpc_method_handler(whole),
        "stream_stream": grpc.stream_stream_rpc_method_handler(parts),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))


@pytest.fixture
def server() -> Iterator[GrpcServer]:
    started = GrpcServer("127.0.0.1:0", (), add_echoes, "silent")
    started.start()
    started.set_ready(True)
    yield started
    started.stop(0)


def connection(server: GrpcServer, *options: tuple[str, int]) -> Any:
    # Channels to one address share a connection unless they say otherwise.
    every = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1), *options)
    return grpc.insecure_channel(f"127.0.0.1:{server.port}", options=every)


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    assert isinstance(error, grpc.Call)
    return error.code()


class Silence:
    """Calls that were begun and say nothing, on as many connections as they need."""

    def __init__(self, server: GrpcServer, method: str, num_calls: int) -> None:
        self._stack = ExitStack()
        self._end = threading.Event()
        self.calls: list[Any] = []
        while len(self.calls) < num_calls:
            begin = self._stack.enter_context(connection(server)).stream_stream(method)
            self.calls += [begin(self._say()) for _ in range(CONNECTION_STREAMS_MAX)]

    def _say(self) -> Iterator[bytes]:
        self._end.wait()
        yield from ()

    def num_ended(self) -> int:
        return sum(call.done() for call in self.calls)

    def end(self) -> None:
        self._end.set()
        self._stack.close()


@pytest.mark.parametrize("method", METHODS)
def test_calls_that_say_nothing_keep_no_thread_from_others(server: GrpcServer, method: str) -> None:
    silence = Silence(server, method, CALLS.threads)
    try:
        kept = (HEALTH_CALLS if "Health" in method else CALLS).waits
        wait_for(lambda: silence.num_ended() == CALLS.threads - kept, "the calls that are too many end")
        with connection(server) as other:
            assert other.unary_unary("/test/unary_unary")(b"abc", timeout=WAIT_S) == b"abc"
            assert b"".join(other.unary_stream("/test/unary_stream")(b"abc", timeout=WAIT_S)) == b"abc"
            health = health_pb2_grpc.HealthStub(other)
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status == 1
            assert next(health.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)).status == 1
        codes = {call.code() for call in silence.calls if call.done()}
        assert codes <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    finally:
        silence.end()


def test_a_watcher_of_health_that_takes_nothing_stops_nobody(server: GrpcServer) -> None:
    with ExitStack() as stack:
        options = ("grpc.http2.lookahead_bytes", 0), ("grpc.http2.bdp_probe", 0)
        take_nothing = [stack.enter_context(connection(server, *options)) for _ in range(3)]
        calls = [c.unary_stream(WATCH)(b"") for c in take_nothing for _ in range(CONNECTION_STREAMS_MAX)]
        too_many = len(calls) - HEALTH_CALLS.waits
        wait_for(lambda: sum(call.done() for call in calls) >= too_many, "the calls that are too many end")
        watcher = health_pb2_grpc.HealthStub(stack.enter_context(connection(server)))
        told = watcher.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert next(told).status == health_pb2.HealthCheckResponse.SERVING
        server.set_ready(False)
        assert next(told).status == health_pb2.HealthCheckResponse.NOT_SERVING
        status = watcher.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        told.cancel()


def test_calls_that_come_with_their_messages_are_all_answered(server: GrpcServer) -> None:
    with ExitStack() as stack:
        num_connections = CALLS.waits // CONNECTION_STREAMS_MAX
        connections = [stack.enter_context(connection(server)) for _ in range(num_connections)]
        methods = [connected.unary_unary("/test/unary_unary") for connected in connections]
        assert {method(b"abc", timeout=WAIT_S) for method in methods} == {b"abc"}  # by then each knows its limit
        calls = [method.future(b"abc", timeout=WAIT_S) for _ in range(CONNECTION_STREAMS_MAX) for method in methods]
        assert {call.result() for call in calls} == {b"abc"}


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
def test_a_unary_call_without_a_message_is_told_so(server: GrpcServer, kind: str) -> None:
    with connection(server) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            next(channel.stream_stream(f"/test/{kind}")(iter(()), timeout=WAIT_S))
        assert code_of(refused.value) is grpc.StatusCode.UNIMPLEMENTED


def test_a_message_that_cannot_be_read_is_told_so(server: GrpcServer) -> None:
    with connection(server) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff", timeout=WAIT_S)
        assert code_of(refused.value) is grpc.StatusCode.INTERNAL
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status == 1
