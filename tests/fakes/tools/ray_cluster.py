"""A Ray cluster on this machine: a head and nodes, each with an address of its own where network namespaces can be had.

    bridge 10.x.y.254 (this side) ── head 10.x.y.1 ── node 10.x.y.2 ── node 10.x.y.3 ── ...

An address that is told wrongly, such as a loopback one, then leads nowhere. Without root all share 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fakes.ports import free_port
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


def can_make_namespaces() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"cptry{os.getpid()}"
    made = _run("ip", "netns", "add", name, check=False) == 0
    linked = made and _run("ip", "link", "add", name, "type", "bridge", check=False) == 0
    if linked:
        _run("ip", "link", "del", name)
    if made:
        _run("ip", "netns", "del", name)
    return linked


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
        self._bridge = f"cpb{os.getpid()}"
        # Of other test processes on this machine each has another.
        self._net = f"10.{64 + os.getpid() // 256 % 128}.{os.getpid() % 256}"
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
            self._connect_namespaces()
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
            for node in self.nodes:
                _run("ip", "netns", "del", node.namespace, check=False)
            _run("ip", "link", "del", self._bridge, check=False)

    def _node(self, index: int) -> RayNode:
        if not self.has_namespaces:
            return RayNode(index, "127.0.0.1", "")
        return RayNode(index, f"{self._net}.{index + 1}", f"cpn{os.getpid()}x{index}")

    def _connect_namespaces(self) -> None:
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self._net}.254/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for node in self.nodes:
            outer = f"cpv{os.getpid()}x{node.index}"
            _run("ip", "netns", "add", node.namespace)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "e0", "netns", node.namespace)
            _run("ip", "link", "set", outer, "master", self._bridge, "up")
            _run("ip", "-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", "e0")
            _run("ip", "-n", node.namespace, "link", "set", "e0", "up")
            _run("ip", "-n", node.namespace, "link", "set", "lo", "up")

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


def _run(*command: str, check: bool = True) -> int:
    return subprocess.run(command, capture_output=True, check=check).returncode


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
