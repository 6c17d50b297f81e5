"""A cache service that forgot its epoch (no Redis, no file) never runs under one that its peers know already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from coppice.addresses import parse_address
from coppice.edge.codec import INDEX, WORKERS, Edge
from coppice.edge.wire import WireClosed, connect, introduction
from coppice.ids import CacheEpoch
from coppice.session.frames import Hello, RejectCode, Welcome
from coppice.session.vouchers import Vouchers
from tests.fakes.cache.cache_ends import CALL_S, SEAL_KEY, Cache, FakeWorker

Keep = Callable[[Any], Any]
KEY = b"k" * 16
EDGES = pytest.mark.parametrize("edge", [INDEX, WORKERS], ids=lambda edge: edge.kind)


def answer(cache: Cache, edge: Edge, hello: Hello) -> Any:
    """None where the connection ends without one, which tells the peer to come again."""
    wire = connect(parse_address(cache.sessions), CALL_S)
    wire.write(introduction(edge.kind), edge.from_client.encode(hello))
    try:
        wire.next(CALL_S)
        return edge.from_server.decode(wire.next(CALL_S))
    except WireClosed:
        return None
    finally:
        wire.close()


@EDGES
def test_a_peer_of_a_later_incarnation_makes_it_start_over_above(keep: Keep, edge: Edge) -> None:
    cache = keep(Cache())
    later = cache.process._service.cache_epoch + 4
    incarnation = (later << 32) | 5
    voucher = Vouchers(bytes.fromhex(SEAL_KEY)).of_session(KEY, incarnation, 0)

    def hello(connection: int) -> Hello:
        return Hello(KEY, connection, incarnation, received=0, epoch=0, name="peer", voucher=voucher)

    answers = (accepted(answer(cache, edge, hello(connection))) for connection in range(1, 6))
    welcome = next(filter(None, answers))
    assert welcome.server_epoch == cache.process._service.cache_epoch == later + 1


@EDGES
@pytest.mark.parametrize("claimed", [65_534, (1 << 32) - 1])
def test_a_forged_hello_moves_no_epoch(keep: Keep, edge: Edge, claimed: int) -> None:
    """One packet of 60 bytes took the last epoch, and the service could never start again."""
    cache = keep(Cache())
    before = cache.process._service.cache_epoch
    true = answer(cache, edge, Hello(KEY, 1, 0, received=0, epoch=0, name="peer"))
    for number, voucher in enumerate((b"", bytes(16), true.voucher)):
        key = bytes([number]) * 16
        forged = Hello(key, 1, claimed << 32, received=0, epoch=claimed << 32, name="peer", voucher=voucher)
        welcome = answer(cache, edge, forged)
        assert isinstance(welcome, Welcome)
        assert (welcome.server_epoch, welcome.fresh) == (before, True)
        assert welcome.epoch != claimed << 32
    assert cache.process._service.cache_epoch == before
    assert 'coppice_cache_unproved_claims_total{of="session"} 3.0' in cache.rest("/metrics")[1]
    cache.restart()
    assert cache.process._service.cache_epoch == before


def test_a_forged_registration_moves_no_epoch(keep: Keep) -> None:
    cache = keep(Cache())
    worker = keep(FakeWorker(cache)).wait_registered()
    forged = replace(worker.register_message(), highest_cache_epoch=CacheEpoch(65_534))
    worker.post(forged)
    worker.wait_registered(2)
    first, second = worker.registered
    assert second.cache_epoch == first.cache_epoch
    assert second.worker_epoch != first.worker_epoch, "nothing of what it says is believed"
    assert 'coppice_cache_unproved_claims_total{of="registration"} 1.0' in cache.rest("/metrics")[1]


def accepted(answer: Any) -> Welcome | None:
    if isinstance(answer, Welcome):
        return answer
    assert answer is None or answer.code is RejectCode.NOT_READY
    return None
