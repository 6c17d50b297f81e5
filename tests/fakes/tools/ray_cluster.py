"""A Ray cluster on this machine: a head and nodes, each with an address of its own where network namespaces can be had.

The head is the first of `namespaces.Machines`. An address that is told wrongly, such as a loopback one, then leads
nowhere. Without root all share 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fakes.ports import free_port
from tests.fakes.tools.namespaces import Machines, can_make_namespaces
from tests.fakes.waiting import wait_for

# A dead node is noticed within some three seconds instead of fifteen.
FAST_DEATH = {
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 4,
}
ROOT = Path(__file__).parents[3]
STORE_BYTES = 80_000_000
START_S = 120


class RayNode:
    """The head (0) or another node. `prefix`: what runs a command there."""

    def __init__(self, index: int, address: str, namespace: str) -> None:
        self.index = index
        self.address = address
        self.namespace = namespace
        self.prefix = ("ip", "netns", "exec", namespace) if namespace else ()

    def pids(self) -> list[int]:
        """Of all that runs in the namespace of the node."""
        assert self.namespace
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [int(word) for word in listed.stdout.split()]


class RayCluster:
    """Started by `started`. `head_cpus` 0: nothing is placed on the head unless it is asked for by its address."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        """`folder` exists, and its path is short: Ray makes sockets below it."""
        self.folder = folder
        self.has_namespaces = can_make_namespaces()
        self._machines = Machines(num_nodes + 1)
        self.nodes = [self._node(index) for index in range(num_nodes + 1)]
        # In a namespace all are free.
        self.port, self.client_port = (6379, 10001) if self.has_namespaces else (free_port(), free_port())

    @property
    def head(self) -> RayNode:
        return self.nodes[0]

    @property
    def address(self) -> str:
        """As nodes and drivers on the head know it."""
        return f"{self.head.address}:{self.port}"

    @property
    def on(self) -> str:
        """For `coppice up --on`, from this machine."""
        return f"ray://{self.head.address}:{self.client_port}"

    def start(self, cpus: int = 2, head_cpus: int = 0) -> None:
        if self.has_namespaces:
            self._machines.connect()
        config = json.dumps(FAST_DEATH)
        head = ["--head", f"--port={self.port}", f"--ray-client-server-port={self.client_port}"]
        head += ["--include-dashboard=false", f"--system-config={config}"]
        assert self._start(self.head, head_cpus, *head).wait(START_S) == 0, self.output()
        for node in self.nodes[1:]:  # two at once would choose the same names of sockets
            assert self._start(node, cpus, f"--address={self.address}").wait(START_S) == 0, self.output()

    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.out")))

    def raylet(self, node: RayNode) -> int:
        """The process id of a node's raylet."""
        found = [
            pid
            for pid, words in self._processes()
            if words[0].endswith("/raylet") and f"--node_ip_address={node.address}" in words
        ]
        assert len(found) == 1, (node.address, found)
        return found[0]

    def close(self) -> None:
        """Kill what Ray started, and nothing else."""

        def left() -> list[int]:
            if self.has_namespaces:
                return [pid for node in self.nodes for pid in node.pids()]
            return [pid for pid, words in self._processes() if any(str(self.folder) in word for word in words)]

        def none_left() -> bool:
            pids = left()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        wait_for(none_left, "Ray's processes end")
        if self.has_namespaces:
            self._machines.remove()

    def _node(self, index: int) -> RayNode:
        if not self.has_namespaces:
            return RayNode(index, "127.0.0.1", "")
        machine = self._machines.all[index]
        return RayNode(index, machine.address, machine.namespace)

    def _start(self, node: RayNode, cpus: int, *options: str) -> subprocess.Popen[bytes]:
        command = [
            *(*node.prefix, sys.executable, "-m", "ray.scripts.scripts", "start", *options),
            *(f"--node-ip-address={node.address}", f"--num-cpus={cpus}", f"--object-store-memory={STORE_BYTES}"),
            *(("--temp-dir", str(self.folder / "ray")) if node is self.head else ()),
            *("--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"),
        ]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "TMPDIR": str(self.folder), "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"}
        with (self.folder / f"{node.index}.out").open("wb") as sink:
            return subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)

    def _processes(self) -> Iterator[tuple[int, Sequence[str]]]:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if int(entry.parent.name) != os.getpid() and any(str(self.folder) in word for word in words):
                yield int(entry.parent.name), words


@contextlib.contextmanager
def started_in_short_folder(num_nodes: int, cpus: int = 2, head_cpus: int = 0) -> Iterator[RayCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="coppice-", ignore_cleanup_errors=True) as folder,
        started(Path(folder), num_nodes, cpus, head_cpus) as cluster,
    ):
        yield cluster


@contextlib.contextmanager
def started(folder: Path, num_nodes: int, cpus: int = 2, head_cpus: int = 0) -> Iterator[RayCluster]:
    cluster = RayCluster(folder, num_nodes)
    try:
        cluster.start(cpus, head_cpus)
        yield cluster
    finally:
        cluster.close()
