"""Machines that are network namespaces of this one, each with an address of its own on one bridge.

bridge 10.x.y.254 (this side) ── 10.x.y.1 ── 10.x.y.2 ── 10.x.y.3 ── ...
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass


def can_make_namespaces() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"cptry{os.getpid()}"
    made = run("ip", "netns", "add", name, check=False) == 0
    linked = made and run("ip", "link", "add", name, "type", "bridge", check=False) == 0
    if linked:
        run("ip", "link", "del", name)
    if made:
        run("ip", "netns", "del", name)
    return linked


@dataclass(frozen=True, slots=True)
class Machine:
    """`prefix`: what runs a command there."""

    address: str
    namespace: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace) if self.namespace else ()

    def cut_off(self) -> None:
        """Nothing reaches it any more, and nothing says so."""
        run("ip", "-n", self.namespace, "link", "set", "e0", "down")


class Machines:
    """`connect` makes them, `remove` takes them away."""

    def __init__(self, num_machines: int) -> None:
        self._bridge = f"cpb{os.getpid()}"
        # Of other test processes on this machine each has another.
        self._net = f"10.{64 + os.getpid() // 256 % 128}.{os.getpid() % 256}"
        self.all = [Machine(f"{self._net}.{index + 1}", f"cpn{os.getpid()}x{index}") for index in range(num_machines)]

    def _outer(self, index: int) -> str:
        """This side's end of a machine's link."""
        return f"cpv{os.getpid()}x{index}"

    def connect(self) -> None:
        run("ip", "link", "add", self._bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self._net}.254/24", "dev", self._bridge)
        run("ip", "link", "set", self._bridge, "up")
        for index, machine in enumerate(self.all):
            outer = self._outer(index)
            run("ip", "netns", "add", machine.namespace)
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", "e0", "netns", machine.namespace)
            run("ip", "link", "set", outer, "master", self._bridge, "up")
            run("ip", "-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", "e0")
            run("ip", "-n", machine.namespace, "link", "set", "e0", "up")
            run("ip", "-n", machine.namespace, "link", "set", "lo", "up")

    def remove(self) -> None:
        """A namespace outlives its name while a connection in it still waits for a machine that fell silent; its link
        would stay, and the next one could not have the name."""
        for index, machine in enumerate(self.all):
            run("ip", "link", "del", self._outer(index), check=False)
            run("ip", "netns", "del", machine.namespace, check=False)
        run("ip", "link", "del", self._bridge, check=False)


@contextlib.contextmanager
def connected(num_machines: int) -> Iterator[list[Machine]]:
    machines = Machines(num_machines)
    try:
        machines.connect()
        yield machines.all
    finally:
        machines.remove()


def run(*command: str, check: bool = True) -> int:
    return subprocess.run(command, capture_output=True, check=check).returncode
