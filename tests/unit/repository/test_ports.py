"""Ports of the tests' own services: two test processes side by side are given none in common."""

from __future__ import annotations

import subprocess
import sys

from tests.fakes.ports import PER_PROCESS, free_port

NEIGHBOUR = (
    "from tests.fakes.ports import free_port, PER_PROCESS\nprint(*(free_port() for _ in range(PER_PROCESS // 10)))"
)


def test_a_neighbour_is_given_other_ports() -> None:
    own = {free_port() for _ in range(PER_PROCESS)}
    neighbour = subprocess.run([sys.executable, "-c", NEIGHBOUR], capture_output=True, text=True, check=True)
    others = {int(port) for port in neighbour.stdout.split()}
    assert len(others) == PER_PROCESS // 10
    assert not own & others


def test_no_port_is_given_twice_in_a_row() -> None:
    assert len({free_port() for _ in range(PER_PROCESS // 10)}) == PER_PROCESS // 10
