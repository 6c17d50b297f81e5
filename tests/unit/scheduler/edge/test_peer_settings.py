"""Where planners are reached by front doors of other schedulers, and where theirs are: what may be given."""

from __future__ import annotations

import pytest

from coppice.errors import UsageError
from coppice.settings import parse_settings
from coppice_scheduler.edge.base.settings import ServiceSettings

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


def test_planners_that_others_can_reach_need_tls_or_a_word() -> None:
    given = ("--planner-port=0", "--planner-host=0.0.0.0")
    with pytest.raises(UsageError, match=r"--planner-host 0\.0\.0\.0 can be reached from other machines"):
        settings(*given).check_listening()
    settings(*given, *TLS).check_listening()
    settings(*given, "--insecure-network").check_listening()
    settings("--planner-host=0.0.0.0").check_listening()
