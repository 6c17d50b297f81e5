"""What one peer may take of the gRPC port of a service with threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from coppice.edge.grpc_server import (
    CHANNEL_OPTIONS,
    CONNECTION_STREAMS_MAX,
    REQUEST_BYTES_MAX,
    GrpcServer,
)
from coppice.ids import TOKEN_BYTES
from tests.fakes.waiting import wait_for

CALL_S = 30


class Blocking:
    """`Wait` ends when `let_go` is set; `Echo` says how many bytes it was sent."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.num_waiting = 0
        self._lock = threading.Lock()
        self.server = GrpcServer("127.0.0.1:0", (), self._add_to, "limits")
        self.server.start()

    def _add_to(self, server: grpc.Server) -> None:
        handlers = {
            "Wait": grpc.unary_unary_rpc_method_handler(self._wait),
            "Echo": grpc.unary_unary_rpc_method_handler(lambda request, context: b"%d" % len(request)),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))

    def _wait(self, request: bytes, context: Any) -> bytes:
        with self._lock:
            self.num_waiting += 1
        self.let_go.wait(CALL_S)
        return b""

    def stop(self) -> None:
        self.let_go.set()
        self.server.stop(1.0)


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    made = Blocking()
    yield made
    made.stop()


def channel(blocking: Blocking) -> grpc.Channel:
    # Channels to one address share a connection unless they say otherwise.
    options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
    return grpc.insecure_channel(f"127.0.0.1:{blocking.server.port}", options=options)


def test_one_connection_does_not_take_all_threads(blocking: Blocking) -> None:
    with ExitStack() as stack:
        greedy, other = (stack.enter_context(channel(blocking)) for _ in range(2))
        wait = greedy.unary_unary("/test/Wait")
        calls = [wait.future(b"", timeout=CALL_S) for _ in range(8 * CONNECTION_STREAMS_MAX)]
        wait_for(lambda: blocking.num_waiting >= CONNECTION_STREAMS_MAX, "calls that wait")
        assert other.unary_unary("/test/Echo")(b"abc", timeout=CALL_S) == b"3"
        assert blocking.num_waiting == CONNECTION_STREAMS_MAX
        for call in calls:
            call.cancel()


def test_a_message_is_as_long_as_a_prompt_may_be(blocking: Blocking) -> None:
    prompt = TOKEN_BYTES << 20
    assert prompt < REQUEST_BYTES_MAX <= 2 * prompt
    with channel(blocking) as open_channel:
        echo = open_channel.unary_unary("/test/Echo")
        assert echo(bytes(REQUEST_BYTES_MAX), timeout=CALL_S) == b"%d" % REQUEST_BYTES_MAX
        with pytest.raises(grpc.RpcError) as caught:
            echo(bytes(REQUEST_BYTES_MAX + 1), timeout=CALL_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
