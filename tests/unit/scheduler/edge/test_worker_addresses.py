"""Where a worker says that it is: nobody's word about that ends the planner, or leads it past TLS; nor does a lack of
threads for its session end it."""

from __future__ import annotations

from typing import Any

import pytest

from coppice.ids import CacheEpoch, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import WorkerInfo, Workers
from coppice_scheduler.edge.planner.clients import WorkerClients
from tests.fakes.threads import no_threads

NOT_TLS: Any = None
TLS: Any = object()  # never looked at: no connection is made


def clients(tls: Any, *, is_local: bool) -> WorkerClients:
    def unexpected(*_: Any) -> None:
        raise AssertionError

    def nothing(_: Any) -> None:
        """Nobody listens at these addresses: that is told."""

    return WorkerClients("s", nothing, unexpected, unexpected, nothing, unexpected, unexpected, tls, is_local=is_local)


def listed(*addresses: str) -> Workers:
    infos = (
        WorkerInfo(WorkerId(f"w{at}"), WorkerEpoch(1), address, 8, 4, Namespace(b"n"), "m", True)
        for at, address in enumerate(addresses)
    )
    return Workers(CacheEpoch(1), tuple(infos))


@pytest.mark.parametrize("address", ["", "x", "host:port", "host:²", "unix:rel", f"unix:/{'x' * 200}", "unix:/a\0b"])
def test_a_worker_that_is_nowhere_is_left_out(address: str, caplog: pytest.LogCaptureFixture) -> None:
    workers = clients(NOT_TLS, is_local=True)
    try:
        for _ in range(2):
            workers.listed(listed(address, "127.0.0.1:9"))
        assert set(workers._clients) == {"w1"}
        assert [record.getMessage() for record in caplog.records if "w0 is left out" in record.getMessage()] != []
        assert len([record for record in caplog.records if "left out" in record.getMessage()]) == 1
    finally:
        workers.stop()


def test_with_tls_a_socket_of_this_machine_is_not_followed_from_another_one() -> None:
    workers = clients(TLS, is_local=False)
    workers.listed(listed("unix:/run/some.sock"))
    assert not workers._clients


def test_where_all_are_on_one_machine_it_is() -> None:
    for tls, is_local in ((TLS, True), (NOT_TLS, False)):
        workers = clients(tls, is_local=is_local)
        try:
            workers.listed(listed("unix:/run/nobody.sock"))
            assert set(workers._clients) == {"w0"}
        finally:
            workers.stop()


def test_a_worker_without_a_thread_for_it_waits_for_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers = clients(NOT_TLS, is_local=True)
    try:
        with no_threads(monkeypatch):
            for _ in range(2):
                workers.listed(listed("127.0.0.1:9", "127.0.0.1:9"))
                workers.tend()
            workers.listed(listed("127.0.0.1:9"))
            assert not workers._clients
            assert len([record for record in caplog.records if "w0 is left out" in record.getMessage()]) == 1
        workers.tend()
        assert set(workers._clients) == {"w0"}, "w1 is listed no more"
        client = workers._clients[WorkerId("w0")]
        workers.tend()
        assert workers._clients == {"w0": client}
    finally:
        workers.stop()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_worker_that_waits_is_forgotten_with_what_it_waits_for(monkeypatch: pytest.MonkeyPatch, is_new: bool) -> None:
    workers = clients(NOT_TLS, is_local=True)
    with no_threads(monkeypatch):
        workers.listed(listed("127.0.0.1:9"))
    if is_new:
        workers.new_epoch(SchedulerEpoch(7))
    else:
        workers.listed(listed("nowhere"))
    workers.tend()
    assert not workers._clients
