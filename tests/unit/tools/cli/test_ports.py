"""Ports that a stack, a benchmark or a test is given: usual ones, named ones, any free one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coppice.errors import UnavailableError
from coppice_up.host import Needs, PortNeed
from coppice_up.local_host import choose_addresses
from coppice_up.ports import LOOPBACK, PortClaims, free_addresses
from tests.fakes.ports import free_port

CLAIMS_AND_WAITS = """
import sys
from coppice_up.ports import PortClaims
claims = PortClaims()
print(claims.claim(int(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_folder_of_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_port()  # whose range is claimed where all test processes look
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def claims() -> Iterator[PortClaims]:
    made = PortClaims()
    yield made
    made.close()


def ports_of(claims: PortClaims, *ports: PortNeed) -> list[int]:
    (chosen,) = choose_addresses([Needs(name="child", group="", ports=ports)], claims).values()
    return [chosen[port.name].port for port in ports]


def test_a_port_is_not_given_out_again_before_its_service_listens() -> None:
    """Two stacks of a benchmark begin in one process; a worker of the first may still load its model."""
    first, second = free_addresses(13), free_addresses(13)
    assert len({*first, *second}) == 26


def test_usual_ports_are_taken_when_nobody_has_them(claims: PortClaims) -> None:
    first, second = free_port(), free_port()
    assert ports_of(claims, PortNeed("a", usual=first), PortNeed("b", usual=second)) == [first, second]


def test_a_usual_port_on_which_somebody_listens_is_left_to_him(claims: PortClaims) -> None:
    usual = free_port()
    with socket.create_server((LOOPBACK, usual)):
        (given,) = ports_of(claims, PortNeed("a", usual=usual))
    assert given != usual
    other = PortClaims()
    assert ports_of(other, PortNeed("a", usual=usual)) == [usual], "it is free again, and nobody holds its lock"
    other.close()


def test_a_usual_port_that_the_user_gave_to_another_service_is_his(claims: PortClaims) -> None:
    port = free_port()
    named = PortNeed("rest", number=port, flag="--port")
    assert ports_of(claims, PortNeed("admin", usual=port), named)[1] == port
    assert ports_of(claims, PortNeed("admin", usual=port), named)[0] != port


def test_two_stacks_that_start_at_once_never_have_one_port(claims: PortClaims) -> None:
    """Neither listens yet: the socket of the other would look free."""
    usual, other = free_port(), PortClaims()
    assert ports_of(claims, PortNeed("a", usual=usual)) == [usual]
    assert ports_of(other, PortNeed("a", usual=usual)) != [usual]
    with pytest.raises(UnavailableError, match=f"port {usual} on 127.0.0.1 is in use") as refused:
        ports_of(other, PortNeed("a", number=usual, flag="--cache-admin-port"))
    assert refused.value.hint == "choose another with --cache-admin-port"
    claims.close()
    assert ports_of(other, PortNeed("a", usual=usual)) == [usual]
    other.close()


def test_a_claim_ends_with_its_process(claims: PortClaims) -> None:
    port = free_port()
    stack = subprocess.Popen(
        [sys.executable, "-c", CLAIMS_AND_WAITS, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with stack:
        assert stack.stdout is not None
        assert stack.stdout.readline() == "True\n"
        assert not claims.claim(port)
        stack.kill()
    assert claims.claim(port)


def test_a_port_whose_lock_belongs_to_somebody_else_is_not_ours(claims: PortClaims, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / f"coppice-{os.getuid()}-port-{port}").symlink_to(tmp_path / "elsewhere")
    assert not claims.claim(port)
    assert not (tmp_path / "elsewhere").exists()
    assert ports_of(claims, PortNeed("a", usual=port)) != [port]


def test_a_named_port_on_which_somebody_listens_is_an_error(claims: PortClaims) -> None:
    port = free_port()
    with socket.create_server((LOOPBACK, port)), pytest.raises(UnavailableError, match="is in use"):
        ports_of(claims, PortNeed("a", number=port, flag="--operator-port"))
