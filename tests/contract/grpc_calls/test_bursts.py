"""A client that says more in one instant than one connection has places for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coppice.edge.grpc_server import CHANNEL_OPTIONS, CONNECTION_STREAMS_MAX, GrpcServer
from tests.fakes.waiting import WAIT_S

OPERATING = Path(__file__).parents[3] / "docs" / "OPERATING.md"
SERVICE = "coppice_rpc.v1.PrefixIndex"
NUM_CALLS = 6 * CONNECTION_STREAMS_MAX


def add_echo(server: grpc.Server) -> None:
    def echo(said: Any, context: Any) -> bytes:
        return bytes(said)

    handlers = {"Stats": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


@pytest.fixture
def server() -> Iterator[GrpcServer]:
    started = GrpcServer("127.0.0.1:0", (), add_echo, "bursts")
    started.start()
    yield started
    started.stop(0)


def test_with_the_policy_of_the_documents_all_are_answered(server: GrpcServer) -> None:
    (policy,) = re.findall(r"```json\n(\{\"methodConfig\".*?)```", OPERATING.read_text(), re.DOTALL)
    options = (*CHANNEL_OPTIONS, ("grpc.service_config", policy), ("grpc.use_local_subchannel_pool", 1))
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
        asked: Any = channel.unary_unary(f"/{SERVICE}/Stats")
        assert asked(b"first", timeout=WAIT_S) == b"first"
        for _ in range(3):
            calls = [asked.future(b"%d" % number, timeout=WAIT_S) for number in range(NUM_CALLS)]
            assert [call.result() for call in calls] == [b"%d" % number for number in range(NUM_CALLS)]
