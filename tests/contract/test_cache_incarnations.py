"""A cache service that forgot its epoch (no Redis, no file) never runs under one that its peers know already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from coppice.addresses import parse_address
from coppice.edge import index_codec, registration_codec
from coppice.edge.frame_codec import Edge
from coppice.edge.wire import WireClosed, connect, introduction
from coppice.session.frames import Hello, RejectCode, Welcome
from tests.fakes.cache_ends import CALL_S, Cache

Keep = Callable[[Any], Any]


@pytest.mark.parametrize("edge", [index_codec.EDGE, registration_codec.EDGE], ids=lambda edge: edge.kind)
def test_a_peer_of_a_later_incarnation_makes_it_start_over_above(keep: Keep, edge: Edge) -> None:
    cache = keep(Cache())
    before = cache.process._service.cache_epoch
    later = before + 4

    def hello(connection: int) -> Any:
        """The answer; None where the connection ends without one, which tells the peer to come again."""
        frame = Hello(b"k" * 16, connection, incarnation=(later << 32) | 5, received=0, epoch=0, name="peer")
        wire = connect(parse_address(cache.sessions), CALL_S)
        wire.write(introduction(edge.kind), edge.from_client.encode(frame))
        try:
            wire.next(CALL_S)
            return edge.from_server.decode(wire.next(CALL_S))
        except WireClosed:
            return None
        finally:
            wire.close()

    welcome = next(filter(None, (accepted(hello(connection)) for connection in range(1, 6))))
    assert welcome.server_epoch == cache.process._service.cache_epoch == later + 1


def accepted(answer: Any) -> Welcome | None:
    if isinstance(answer, Welcome):
        return answer
    assert answer is None or answer.code is RejectCode.NOT_READY
    return None
