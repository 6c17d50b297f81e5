"""A peer that cannot be reached is named in the log, with its address and the reason, and so is that it is back."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest

from coppice.edge import link_client, session_socket
from coppice.ids import CacheEpoch, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import WorkerInfo, Workers
from coppice.session.frames import Reject, RejectCode
from coppice.session.link import ServerLinks
from coppice_scheduler.edge.planner.clients import IndexClient, WorkerClients
from tests.fakes.certificates import Authority
from tests.fakes.link_ends import ClientEnd, ServerEnd
from tests.fakes.ports import free_port
from tests.fakes.tcp_proxy import TcpProxy
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _told_early(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(link_client, "OUTAGE_TOLD_S", 0.0)
    monkeypatch.setattr(link_client, "BACKOFF_LAST_S", 0.1)


@pytest.fixture
def ports() -> Iterator[dict[str, int]]:
    """Ports at which something is wrong."""
    with ExitStack() as stack:
        listening = [stack.enter_context(socket.socket()) for _ in range(3)]
        for one, backlog in zip(listening, (0, 8, 8), strict=True):
            one.bind(("127.0.0.1", 0))
            one.listen(backlog)
        full, mute, rude = listening
        for _ in range(3):  # more than wait there: packets of whoever comes now are dropped
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())

        def hang_up() -> None:
            try:
                while True:
                    rude.accept()[0].close()
            except OSError:
                return

        stack.callback(lambda: rude.shutdown(socket.SHUT_RDWR))
        threading.Thread(target=hang_up, daemon=True).start()
        named = {"full": full, "mute": mute, "rude": rude}
        yield {name: one.getsockname()[1] for name, one in named.items()} | {"nobody": free_port()}


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("nobody", "Connection refused"),
        ("full", "timed out"),
        ("mute", "heard nothing for"),
        ("rude", "closed by the other side|Connection reset by peer"),
    ],
)
def test_who_cannot_be_reached_is_named_with_address_and_reason(
    keep: Keep,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ports: dict[str, int],
    where: str,
    reason: str,
) -> None:
    monkeypatch.setattr(link_client, "SUSPECT_S", 0.3)
    keep(ClientEnd(ports[where]))
    said = rf"client to server: no connection for \d+ s \(127.0.0.1:{ports[where]}: ({reason}).*\); trying on"
    wait_for(lambda: re.search(said, caplog.text), f"a word about it; said: {caplog.messages}")


def authority(folder: Path) -> Authority:
    folder.mkdir()
    return Authority(folder)


def test_a_certificate_that_is_refused_is_named_with_the_address(
    keep: Keep, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    ours, others = authority(tmp_path / "ours"), authority(tmp_path / "others")
    server = keep(ServerEnd(ServerLinks(1, 1), tls=ours.credentials("worker", "w0")))
    keep(ClientEnd(server.where, tls=others.credentials("scheduler", "s0"), name="s0"))
    said = rf"s0 to server: {server.where}: .*certificate"
    wait_for(lambda: re.search(said, caplog.text), f"a word about it; said: {caplog.messages}")


@pytest.mark.parametrize("with_tls", ["client", "server"])
def test_plain_text_beside_tls_is_named_with_the_address(
    keep: Keep, caplog: pytest.LogCaptureFixture, tmp_path: Path, with_tls: str
) -> None:
    ours = authority(tmp_path / "ours")
    server = keep(ServerEnd(ServerLinks(1, 1), tls=ours.credentials("worker", "w0") if with_tls == "server" else None))
    keep(ClientEnd(server.where, tls=ours.credentials("scheduler", "s0") if with_tls == "client" else None))
    said = rf"client to server: (no connection for \d+ s \()?{server.where}: "
    wait_for(lambda: re.search(said, caplog.text), f"a word about it; said: {caplog.messages}")


def test_a_scheduler_names_the_cache_and_the_worker_that_it_cannot_reach(
    keep: Keep, caplog: pytest.LogCaptureFixture
) -> None:
    cache, worker = free_port(), free_port()
    index = IndexClient(f"127.0.0.1:{cache}", "s0", lambda turn: None, print, print, lambda: None, None)
    keep(index)
    index.start()
    ignored: Any = lambda *_: None  # noqa: E731
    workers = WorkerClients("s0", ignored, ignored, ignored, ignored, ignored, ignored, None, is_local=False)
    keep(workers)
    workers.new_epoch(SchedulerEpoch(1))
    info = WorkerInfo(WorkerId("w0"), WorkerEpoch(1), f"127.0.0.1:{worker}", 1, 16, Namespace(b""), "tiny", True)
    workers.listed(Workers(CacheEpoch(1), (info,)))
    for peer, port in (("cache", cache), ("w0", worker)):
        said = rf"s0 to {peer}: no connection for \d+ s \(127.0.0.1:{port}: Connection refused\)"
        wait_for(lambda said=said: re.search(said, caplog.text), f"a word about {peer}")


def told(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.levelname for record in caplog.records if text in record.getMessage()]


def wait_for_more_attempts(caplog: pytest.LogCaptureFixture) -> None:
    tried = caplog.text.count("connection ended")
    wait_for(lambda: caplog.text.count("connection ended") > tried + 2, "more attempts")


def test_it_is_told_once_and_so_is_that_the_peer_came(
    keep: Keep, caplog: pytest.LogCaptureFixture, socket_dir: Path
) -> None:
    where = f"unix:{socket_dir}/sessions"
    client = keep(ClientEnd(where))
    for outage in (1, 2):
        wait_for_more_attempts(caplog)
        reason = f"({where}: No such file or directory); trying on"
        assert told(caplog, reason) == ["WARNING"] * outage, "not at each attempt"
        server = ServerEnd(ServerLinks(outage, outage), where)
        client.wait_attached(outage)
        wait_for(lambda outage=outage: told(caplog, "client to server: connected") == ["INFO"] * outage, "it is back")
        server.stop()
        wait_for(lambda: len(client.lost) == len(client.attached), "the connection to end")
        assert client.lost[-1].startswith(f"{where}: ")


def test_it_is_told_again_from_time_to_time(
    keep: Keep, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_client, "OUTAGE_TOLD_AGAIN_S", 0.2)
    keep(ClientEnd(free_port()))
    wait_for(lambda: len(told(caplog, "Connection refused); trying on")) >= 3, "the third time")


def test_a_refusal_is_told_again_and_that_it_is_over(
    keep: Keep, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_client, "OUTAGE_TOLD_AGAIN_S", 0.2)
    server = keep(ServerEnd(ServerLinks(1, 1)))
    server.refusal = Reject(RejectCode.FENCED, "not you")
    client = keep(ClientEnd(server.where))
    wait_for(lambda: len(told(caplog, f"({server.where}: not you); trying on")) >= 2, "the refusal, again")
    assert client.rejected == [server.refusal]
    server.refusal = None
    client.wait_attached()
    wait_for(lambda: told(caplog, "client to server: connected") == ["INFO"], "a word about its end")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "the name is not resolved: Name or service"),
        (TimeoutError("timed out"), "timed out"),
    ],
    ids=["no such name", "silence"],
)
def test_it_is_told_why_a_name_cannot_be_reached(
    keep: Keep, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: OSError, reason: str
) -> None:
    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(session_socket, "connect", fail)
    keep(ClientEnd("cache.example:7081"))
    wait_for(lambda: f"(cache.example:7081: {reason}" in caplog.text, "a word about it")


# ---- what the application hears ----


def test_a_client_hears_that_nobody_listens_any_more(keep: Keep, listen_on: str) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1), listen_on))
    client = keep(ClientEnd(server.where))
    client.wait_attached()
    assert not client.num_refused
    server.stop()
    wait_for(lambda: client.num_refused >= 2, "an attempt, and another one")
    assert client.lost


def test_silence_does_not_say_that_nobody_listens(keep: Keep) -> None:
    """Nor does a connection that is closed: whoever did it may be there."""
    server = keep(ServerEnd(ServerLinks(1, 1)))
    proxy = keep(TcpProxy(server.port))
    client = keep(ClientEnd(proxy.port))
    client.wait_attached()
    proxy.down = True
    proxy.cut()
    wait_for(lambda: client.lost, "the outage")
    proxy.down = False
    client.wait_attached(2)
    assert not client.num_refused
