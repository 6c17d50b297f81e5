"""A cache service that forgot its epoch (no Redis, no file) never runs under one that its peers know already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from coppice.edge import index_codec, registration_codec
from coppice.session.frames import Hello, RejectCode, Welcome
from coppice_rpc.v1 import cache_pb2_grpc
from tests.fakes.cache_ends import CALL_S, Cache

Keep = Callable[[Any], Any]


@pytest.mark.parametrize("rpc", ["Session", "WorkerSession"])
def test_a_peer_of_a_later_incarnation_makes_it_start_over_above(keep: Keep, rpc: str) -> None:
    cache = keep(Cache())
    before = cache.process._service.cache_epoch
    later = before + 4
    codec = index_codec if rpc == "Session" else registration_codec
    encode = (index_codec.CLIENT_FRAMES if rpc == "Session" else registration_codec.WORKER_FRAMES).encode

    def hello(connection: int) -> Any:
        """The answer; None where the stream ends without one, which tells the peer to come again."""
        frame = Hello(b"k" * 16, connection, incarnation=(later << 32) | 5, received=0, epoch=0, name="peer")
        with grpc.insecure_channel(f"127.0.0.1:{cache.port}") as channel:
            stub = cache_pb2_grpc.PrefixIndexStub(channel)
            answers = iter(getattr(stub, rpc)(iter([encode(frame)]), timeout=CALL_S))
            try:
                return codec.SERVER_FRAMES.decode(next(answers))
            except (grpc.RpcError, StopIteration):
                return None

    welcome = next(filter(None, (accepted(hello(connection)) for connection in range(1, 6))))
    assert welcome.server_epoch == cache.process._service.cache_epoch == later + 1


def accepted(answer: Any) -> Welcome | None:
    if isinstance(answer, Welcome):
        return answer
    assert answer is None or answer.code is RejectCode.NOT_READY
    return None
