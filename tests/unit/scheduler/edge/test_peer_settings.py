"""Where planners are reached by front doors of other schedulers, and where theirs are: what may be given."""

from __future__ import annotations

import logging
from contextlib import ExitStack

import pytest

from coppice.errors import UnavailableError, UsageError
from coppice.settings import parse_settings
from coppice_scheduler.edge.base.settings import ServiceSettings
from coppice_scheduler.edge.service import _peer_sockets
from tests.fakes.ports import free_port

TLS = ("--tls-cert=a", "--tls-key=b", "--tls-ca=c")


def settings(*argv: str, **environ: str) -> ServiceSettings:
    return parse_settings(ServiceSettings, ["--model=m", *argv], environ, "scheduler")


def test_unless_asked_for_planners_are_reached_by_their_own_front_doors_alone() -> None:
    given = settings()
    assert (given.planner_port, given.planner_peers) == (None, ())


def test_peers_are_a_list_of_addresses() -> None:
    given = settings(COPPICE_SCHEDULER_PLANNER_PEERS="a:7083, [::1]:7084")
    assert given.planner_peers == ("a:7083", "[::1]:7084")


@pytest.mark.parametrize("peer", ["a", "a:0", "a:65536", "unix:/x", ":7"])
def test_what_is_no_address_of_a_peer_is_refused(peer: str) -> None:
    with pytest.raises(UsageError, match="--planner-peers: "):
        settings(f"--planner-peers=b:1,{peer}")


def test_each_planner_needs_a_port() -> None:
    assert settings("--planners=2", "--planner-port=65534").planner_port == 65534
    with pytest.raises(UsageError, match="--planner-port 65535 leaves no ports for 2 planners"):
        settings("--planners=2", "--planner-port=65535")


def test_each_planner_listens_on_a_port_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with caplog.at_level(logging.INFO), ExitStack() as sockets:
        assert [*_peer_sockets(sockets, settings("--planners=2"), 1)] == []
        (listener,) = _peer_sockets(sockets, settings("--planners=2", f"--planner-port={port - 1}"), 1)
        assert listener.getsockname() == ("127.0.0.1", port)
        (free,) = _peer_sockets(sockets, settings("--planner-port=0"), 0)
        assert f"reach planner 0 on 127.0.0.1:{free.getsockname()[1]}" in caplog.text
        with pytest.raises(UnavailableError, match=rf"cannot listen on 127\.0\.0\.1:{port} "):
            [*_peer_sockets(sockets, settings(f"--planner-port={port}"), 0)]


def test_planners_that_others_can_reach_need_tls_or_a_word() -> None:
    given = ("--planner-port=0", "--planner-host=0.0.0.0")
    with pytest.raises(UsageError, match=r"--planner-host 0\.0\.0\.0 can be reached from other machines"):
        settings(*given).check_listening()
    settings(*given, *TLS).check_listening()
    settings(*given, "--insecure-network").check_listening()
    settings("--planner-host=0.0.0.0").check_listening()
