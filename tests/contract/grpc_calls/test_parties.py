"""What one party may take of a gRPC server with threads, where certificates say who calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.edge.grpc_server import CALLS, CONNECTION_STREAMS_MAX, GrpcServer
from coppice.edge.grpc_tls import open_channel
from coppice.tls.credentials import Credentials
from coppice.tls.identity import Role
from coppice.tls.rights import RPCS
from tests.fakes.certificates import Authority
from tests.fakes.waiting import WAIT_S, wait_for

WAIT = "/test/Wait"


class Blocking:
    """`Wait` ends when `let_go` is set."""

    def __init__(self, tls: Credentials) -> None:
        self.let_go = threading.Event()
        self.num_waiting = 0
        self._lock = threading.Lock()
        self.server = GrpcServer("127.0.0.1:0", (), self._add_to, "parties", tls=tls)
        self.server.start()
        self.server.set_ready(True)

    def _add_to(self, server: grpc.Server) -> None:
        handlers: dict[str, Any] = {"Wait": grpc.unary_unary_rpc_method_handler(self._wait)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))

    def _wait(self, request: bytes, context: Any) -> bytes:
        with self._lock:
            self.num_waiting += 1
        self.let_go.wait()
        return b""

    def stop(self) -> None:
        self.let_go.set()
        self.server.stop(1.0)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def blocking(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocking]:
    monkeypatch.setattr("coppice.tls.rights.RPCS", {**RPCS, WAIT: frozenset({Role.OPERATOR})})
    made = Blocking(authority.credentials("worker", "w0"))
    yield made
    made.stop()


def connection(blocking: Blocking, tls: Credentials) -> Any:
    # Channels to one address share a connection unless they say otherwise.
    return open_channel(f"127.0.0.1:{blocking.server.port}", tls, (("grpc.use_local_subchannel_pool", 1),))


def wait_as(blocking: Blocking, tls: Credentials, stack: ExitStack, num_calls: int) -> list[Any]:
    """As many calls of `Wait`, on full connections, and one after the other has them all running."""
    calls: list[Any] = []
    while len(calls) < num_calls:
        running = blocking.num_waiting + CONNECTION_STREAMS_MAX
        method = stack.enter_context(connection(blocking, tls)).unary_unary(WAIT)
        calls += [method.future(b"", timeout=WAIT_S) for _ in range(CONNECTION_STREAMS_MAX)]
        wait_for(lambda running=running: blocking.num_waiting == running, "calls of one connection")
    return calls


def test_one_party_does_not_take_all_threads(blocking: Blocking, authority: Authority) -> None:
    ann, ben = (authority.credentials("operator", name) for name in ("ann", "ben"))
    with ExitStack() as stack:
        kept = wait_as(blocking, ann, stack, CALLS.party_calls)
        refused = stack.enter_context(connection(blocking, ann)).unary_unary(WAIT).future(b"", timeout=WAIT_S)
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.details() == "coppice://operator/ann has as many calls here already as it may have at once"
        kept += wait_as(blocking, ben, stack, 1)
        blocking.let_go.set()
        assert {call.result() for call in kept} == {b""}


def test_health_answers_while_every_thread_is_taken(blocking: Blocking, authority: Authority) -> None:
    parties = (authority.credentials("operator", name) for name in "abc")
    with ExitStack() as stack:
        while left := CALLS.threads - blocking.num_waiting:
            wait_as(blocking, next(parties), stack, min(left, CALLS.party_calls))
        health = health_pb2_grpc.HealthStub(
            stack.enter_context(connection(blocking, authority.credentials("monitor", "m")))
        )
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status == 1
        told = health.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert next(told).status == 1
        told.cancel()


def test_a_role_is_looked_at_before_the_message(blocking: Blocking, authority: Authority) -> None:
    with connection(blocking, authority.credentials("monitor", "m")) as channel:
        end = threading.Event()
        call = channel.stream_unary(WAIT).future(iter(end.wait, True), timeout=WAIT_S)
        code = call.code()
        end.set()
        assert code is grpc.StatusCode.PERMISSION_DENIED
