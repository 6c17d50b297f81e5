"""What every host of `coppice up` does: this machine, and the nodes of a Ray cluster."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coppice.errors import CoppiceError, UnavailableError
from coppice_up.host import Child, ChildSpec, Host, Needs, Place, PortNeed, Program
from coppice_up.local_host import LocalHost
from tests.fakes.tools import ray_cluster
from tests.fakes.tools.ray_cluster import RayCluster
from tests.fakes.waiting import wait_for

SAYS = """
import pathlib, signal, socket, subprocess, sys, time
def stop(*_):
    print("it stops", flush=True)
    sys.exit(7)
mood, port, ready = sys.argv[1:]
signal.signal(signal.SIGTERM, signal.SIG_IGN if mood == "deaf" else stop)
if mood == "deaf":
    deaf = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", ready])
listener = socket.create_server(("", int(port)))
print("it runs", flush=True)
while mood != "dies":
    time.sleep(0.01)
print("it is on fire", flush=True)
sys.exit(3)
"""
FRONT = Needs(name="first", group="front", ports=(PortNeed("sessions"), PortNeed("grpc")), cpus=0.5)
OTHER = Needs(name="other", group="other", ports=(PortNeed("sessions"), PortNeed("grpc")), cpus=1)
Open = Callable[..., Host]


@dataclass(frozen=True, slots=True)
class Exists:
    """A probe that is asked where the child runs."""

    path: Path

    def __call__(self) -> bool:
        return self.path.exists()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    pytest.importorskip("ray", reason="needs coppice[ray]")
    with ray_cluster.started_in_short_folder(num_nodes=2) as cluster:
        yield cluster


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.wide)])
def open_host(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Makes hosts, and closes them."""
    opened: list[Host] = []
    cluster = request.getfixturevalue("cluster") if request.param == "ray" else None

    def open_(model: str = "", log_dir: Path | None = None) -> Host:
        if cluster is None:
            opened.append(LocalHost(model, log_dir))
        else:
            from coppice_up.on_ray.host import RayHost

            opened.append(RayHost(cluster.on, model, log_dir))
        return opened[-1]

    yield open_
    for host in opened:
        host.close(keep_logs=False)


class Run:
    """A child in its place, and the file that makes it ready."""

    def __init__(self, host: Host, place: Place, tmp_path: Path, mood: str, name: str = "first") -> None:
        self.ready = tmp_path / f"{name}.ready"
        argv = (place.program, "-c", SAYS, mood, str(place.addresses["grpc"].port), str(self.ready))
        self.spec = ChildSpec(name, argv, Exists(self.ready), place.folder / f"{name}.log", {"WHO": "we"})
        self.child: Child = host.start(self.spec)

    def wait_for_line(self, line: str, count: int = 1) -> None:
        def look() -> bool:
            self.child.is_running()
            return self.child.last_lines(50).count(line) >= count

        wait_for(look, line)

    def wait_for_end(self) -> str:
        wait_for(lambda: not self.child.is_running(), "it ends")
        return self.child.describe_exit()

    def processes(self) -> list[int]:
        """All on this machine that were started with it, or by it."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if str(self.ready) in words and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
        return found


def test_a_place_has_what_was_asked_for(open_host: Open) -> None:
    places = open_host().place([FRONT, OTHER])
    assert list(places) == ["first", "other"]
    assert {name: list(place.addresses) for name, place in places.items()} == {
        "first": ["sessions", "grpc"],
        "other": ["sessions", "grpc"],
    }
    addresses = [address for place in places.values() for address in place.addresses.values()]
    assert len(set(addresses)) == len(addresses)
    for place in places.values():
        assert Path(place.program).name.startswith("python")
        assert place.folder.stat().st_mode & 0o077 == 0
        assert place.checkpoint.name == "coppice-demo"
    sessions = {str(places[name].sessions(name)) for name in places}
    assert len(sessions) == len(places)


@pytest.mark.parametrize(
    ("needs", "model", "words"),
    [
        (Needs(name="first", group="front", files=(Path("/no/such/file.pem"),)), "", "/no/such/file.pem is not there"),
        (Needs(name="first", group="front"), "/no/such/model", "/no/such/model"),
        (Needs(name="first", group="front", redis_url="redis://user:geheim@127.0.0.1:1/0"), "", "no Redis answers"),
    ],
)
def test_what_is_missing_is_named(open_host: Open, needs: Needs, model: str, words: str) -> None:
    host = open_host(model)
    with pytest.raises(CoppiceError, match=words) as caught:
        host.place([needs])
    assert "geheim" not in caught.value.line()


def test_a_port_that_is_taken_is_said_with_its_flag() -> None:
    """Here; a node has a loopback of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        host = LocalHost()
        needs = Needs(name="first", group="front", ports=(PortNeed("rest", "127.0.0.1", port, flag="--port"),))
        try:
            with pytest.raises(UnavailableError, match=f"port {port} on 127.0.0.1 is in use") as caught:
                host.place([needs])
        finally:
            host.close(keep_logs=False)
    assert "--port" in caught.value.hint


def test_a_valkey_is_found(open_host: Open) -> None:
    place = open_host().place([Needs(name="first", group="front", program=Program.VALKEY)])["first"]
    assert Path(place.program).exists()


def test_a_child_starts_gets_ready_and_stops(open_host: Open, tmp_path: Path) -> None:
    host = open_host()
    run = Run(host, host.place([FRONT])["first"], tmp_path, "runs")
    run.wait_for_line("it runs")
    assert run.child.is_running()
    assert not run.child.is_ready()
    run.ready.touch()
    wait_for(run.child.is_ready, "it is ready")
    assert "it runs" in run.child.new_lines()
    assert run.child.new_lines() == []
    run.child.terminate()
    assert run.wait_for_end() == "exit code 7"
    assert run.child.last_lines(1) == ["it stops"]
    assert not run.child.is_ready()


def test_a_child_that_died_is_started_again_and_its_log_goes_on(open_host: Open, tmp_path: Path) -> None:
    host = open_host()
    run = Run(host, host.place([FRONT])["first"], tmp_path, "dies")
    assert run.wait_for_end() == "exit code 3"
    run.child.restart()
    run.wait_for_line("it is on fire", count=2)
    assert run.wait_for_end() == "exit code 3"
    assert run.child.last_lines(50).count("it is on fire") == 2


def test_a_killed_child_says_so(open_host: Open, tmp_path: Path) -> None:
    host = open_host()
    run = Run(host, host.place([FRONT])["first"], tmp_path, "runs")
    run.wait_for_line("it runs")
    (pid,) = run.processes()
    os.kill(pid, signal.SIGKILL)
    assert run.wait_for_end() == "killed by SIGKILL"


def test_a_kill_takes_what_the_child_has_started(open_host: Open, tmp_path: Path) -> None:
    host = open_host()
    run = Run(host, host.place([FRONT])["first"], tmp_path, "deaf")
    run.wait_for_line("it runs")
    run.child.terminate()
    assert len(run.processes()) == 2
    assert run.child.is_running()
    run.child.kill()
    assert not run.child.is_running()
    wait_for(lambda: not run.processes(), "both end")


def test_a_command_that_cannot_run_is_told(open_host: Open, tmp_path: Path) -> None:
    host = open_host()
    place = host.place([FRONT])["first"]
    child = host.start(ChildSpec("first", ("/no/such/command",), Exists(tmp_path), place.folder / "log"))
    wait_for(lambda: not child.is_running(), "it ends")
    assert child.describe_exit() == "exit code 127"
    assert child.last_lines(1) == ["cannot run /no/such/command: No such file or directory"]


@pytest.mark.parametrize("keep_logs", [False, True])
def test_closing_ends_what_runs_and_keeps_logs_when_it_is_told_to(
    open_host: Open, tmp_path: Path, keep_logs: bool
) -> None:
    host = open_host()
    place = host.place([FRONT])["first"]
    run = Run(host, place, tmp_path, "runs")
    run.wait_for_line("it runs")
    run.child.kill()
    host.close(keep_logs=keep_logs)
    assert (place.folder / "first.log").exists() == keep_logs
    wait_for(lambda: not run.processes(), "it ends")


def test_a_folder_of_the_users_stays(open_host: Open, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    host = open_host("", folder)
    assert host.place([FRONT])["first"].folder == folder
    host.close(keep_logs=False)
    assert folder.exists()


# ---- of a cluster alone ----


@pytest.fixture
def ray_host(cluster: RayCluster) -> Iterator[Any]:
    from coppice_up.on_ray.host import RayHost

    host = RayHost(cluster.on)
    yield host
    host.close(keep_logs=False)


@pytest.mark.wide
def test_groups_are_spread_and_listen_on_their_nodes(ray_host: Any, cluster: RayCluster) -> None:
    beside = Needs(name="second", group="front", ports=(PortNeed("grpc"), PortNeed("local", "127.0.0.1")))
    places = ray_host.place([FRONT, beside, OTHER])
    assert places["second"].addresses["local"].host == "127.0.0.1"
    assert {each.addresses["grpc"].host == each.node for each in places.values()} == {True}
    if cluster.has_namespaces:
        assert places["first"].node == places["second"].node != places["other"].node
        assert cluster.head.address not in {each.node for each in places.values()}


@pytest.mark.wide
def test_what_a_cluster_does_not_have_is_said_at_once(ray_host: Any) -> None:
    with pytest.raises(UnavailableError) as caught:
        ray_host.place([FRONT, Needs(name="other", group="other", cpus=1, gpus=2)])
    asked = "asked for 0.5 CPU, 0 GPU for cache and scheduler, 1 CPU, 2 GPU for 1 worker; it has 3 nodes ("
    assert asked in caught.value.line()


@pytest.mark.wide
def test_a_child_dies_with_its_agent_and_comes_back(ray_host: Any, tmp_path: Path) -> None:
    run = Run(ray_host, ray_host.place([FRONT])["first"], tmp_path, "runs")
    run.wait_for_line("it runs")
    (pid,) = run.processes()
    agent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert b"Agent" in Path(f"/proc/{agent}/cmdline").read_bytes()
    os.kill(agent, signal.SIGKILL)
    assert "does not answer" in run.wait_for_end()
    wait_for(lambda: pid not in run.processes(), "it ends with its agent")
    run.child.restart()
    run.wait_for_line("it runs", count=2)
    assert len(run.processes()) == 1
    assert run.child.is_running()


@pytest.mark.wide
def test_a_connection_that_is_lost_is_said_once(ray_host: Any, tmp_path: Path) -> None:
    import ray

    run = Run(ray_host, ray_host.place([FRONT])["first"], tmp_path, "runs")
    run.wait_for_line("it runs")
    ray.shutdown()
    with pytest.raises(UnavailableError, match="the connection to Ray is lost"):
        wait_for(lambda: not run.child.is_running(), "it is lost")
    assert not run.child.is_running()
    run.child.terminate()
    run.child.kill()
    wait_for(lambda: not run.processes(), "Ray ends what the connection had started")


@pytest.mark.wide
def test_a_head_that_is_not_there_is_named(cluster: RayCluster) -> None:
    from coppice_up.on_ray.host import RayHost

    with pytest.raises(UnavailableError, match=f"no Ray answers at {cluster.head.address}:9"):
        RayHost(f"ray://{cluster.head.address}:9")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from coppice_up.on_ray.host import RayHost

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnavailableError) as caught:
        RayHost("auto")
    assert caught.value.line() == "Ray is not installed (pip install 'coppice[ray]')"
