"""`coppice up --on`: what is asked of a cluster, what is told to children on it; no cluster is needed here."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from coppice.addresses import Address
from coppice.errors import UnavailableError, UsageError
from coppice_cli.up import welcome
from coppice_up.checkpoint import Checkpoint
from coppice_up.host import ChildSpec, Place
from coppice_up.on_ray import host
from coppice_up.on_ray.cluster import ATTEMPTS, Bundle, Node, connect, has_room, what_is_asked, what_there_is
from coppice_up.options import WORKERS_ON_RAY_MAX, UpOptions, ray_head
from coppice_up.plan import FRONT, Services, StackPlan, needs_of, plan_stack
from coppice_up.probe import GrpcServing

CERTS = Path("/certs")
TENANTS = Path("/etc/tenants.yaml")
SERVICES = Services(cache=("cache",), worker=("worker",), scheduler=("scheduler",))


def on_ray(on: str = "ray://head", **more: object) -> UpOptions:
    given: dict[str, object] = {"certs": CERTS, "tenants": TENANTS, "workers": 2, **more}
    return UpOptions(on=on, **given)  # type: ignore[arg-type]


def places_on(nodes: dict[str, str], options: UpOptions) -> dict[str, Place]:
    """`nodes`: the address of each group's."""
    return {
        needs.name: Place(
            nodes[needs.group],
            "python",
            {
                port.name: Address(port.host or nodes[needs.group], 1000 + index)
                for index, port in enumerate(needs.ports)
            },
            Path("/logs"),
            None,
            Checkpoint(Path("/model"), "m"),
        )
        for needs in needs_of(options)
    }


NODES = {FRONT: "10.0.0.1", "worker-0": "10.0.0.2", "worker-1": "10.0.0.3"}


def plan(options: UpOptions) -> StackPlan:
    return plan_stack(options, places_on(NODES, options), {}, SERVICES)


def children(stack: StackPlan) -> dict[str, ChildSpec]:
    return {spec.name: spec for stage in stack.stages for spec in stage}


def flag(spec: ChildSpec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (UpOptions(gpus_per_worker=1), "--gpus-per-worker is for a cluster"),
        (UpOptions(certs=CERTS), "--certs is for a cluster"),
        (UpOptions(insecure_network=True), "--insecure-network is for a cluster"),
        (on_ray("slurm://head"), "--on slurm://head is no cluster"),
        (on_ray("ray://"), "--on ray:// is no cluster"),
        (on_ray("ray://head:port"), "--on ray://head:port is no cluster"),
        (on_ray(gpus_per_worker=-1), "--gpus-per-worker -1 is out of range"),
        (on_ray(gpus_per_worker=2, tensor_parallel=4), "--gpus-per-worker 2 and --tensor-parallel 4 differ"),
        (on_ray(certs=None), "give --certs FOLDER"),
        (on_ray(tenants=None), "give --tenants FILE"),
        (on_ray(host="0.0.0.0"), "--host 0.0.0.0 has no meaning"),
        (on_ray(workers=WORKERS_ON_RAY_MAX + 1), f"1 to {WORKERS_ON_RAY_MAX}"),
        (on_ray("auto", tenants=None, host="0.0.0.0"), "everybody who reaches it may use it"),
    ],
)
def test_what_cannot_work_is_refused(options: UpOptions, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        options.check()
    assert words in caught.value.line()


def test_what_can_work_is_let_through() -> None:
    for options in (
        on_ray(workers=WORKERS_ON_RAY_MAX),
        on_ray(certs=None, insecure_network=True),
        on_ray("auto", tenants=None),
        on_ray(gpus_per_worker=2, tensor_parallel=2),
    ):
        options.check()


@pytest.mark.parametrize(
    ("on", "head"),
    [
        ("ray://head", Address("head", 10001)),
        ("ray://head:9", Address("head", 9)),
        ("ray://[fd00::1]:9", Address("fd00::1", 9)),
        ("ray://[fd00::1]", Address("fd00::1", 10001)),
        ("auto", None),
        ("http://head", None),
    ],
)
def test_the_address_of_a_head(on: str, head: Address | None) -> None:
    assert ray_head(on) == head


def test_workers_are_groups_of_their_own_and_the_rest_is_one() -> None:
    needs = {each.name: each for each in needs_of(on_ray(gpus_per_worker=2, threads=3))}
    assert {name: each.group for name, each in needs.items()} == {
        "valkey": FRONT,
        "cache": FRONT,
        "scheduler": FRONT,
        "worker-0": "worker-0",
        "worker-1": "worker-1",
    }
    assert [(needs[name].cpus, needs[name].gpus) for name in ("worker-0", "scheduler", "cache")] == [
        (3, 2),
        (1, 0),
        (0, 0),
    ]
    assert CERTS / "worker-worker-1-key.pem" in needs["worker-1"].files
    assert {TENANTS, CERTS / "ca.pem", CERTS / "cache-cache-0.pem"} <= set(needs["cache"].files)
    assert TENANTS in needs["scheduler"].files


@pytest.mark.parametrize(
    ("options", "gpus", "ranks"),
    [
        (on_ray(), 0, 1),
        (on_ray(device="cuda"), 1, 1),
        (on_ray(device="cuda", tensor_parallel=4), 4, 4),
        (on_ray(gpus_per_worker=2), 2, 2),
        (on_ray(tensor_parallel=2), 0, 2),
    ],
)
def test_gpus_and_ranks_of_a_worker(options: UpOptions, gpus: int, ranks: int) -> None:
    assert (options.gpus, options.ranks) == (gpus, ranks)
    argv = children(plan(options))["worker-0"].argv
    assert ("--tensor-parallel" in argv) == (ranks > 1)


def test_sessions_run_between_nodes_and_under_tls() -> None:
    found = children(plan(on_ray()))
    assert flag(found["cache"], "--session-address") == "10.0.0.1:1000"
    assert {flag(found[name], "--cache") for name in ("worker-0", "worker-1", "scheduler")} == {"10.0.0.1:1000"}
    assert flag(found["worker-1"], "--session-address").startswith("10.0.0.3:")
    assert flag(found["worker-1"], "--tls-cert") == "/certs/worker-worker-1.pem"
    assert flag(found["cache"], "--tls-key") == "/certs/cache-cache-0-key.pem"
    assert flag(found["scheduler"], "--host") == flag(found["scheduler"], "--metrics-host") == "10.0.0.1"
    assert flag(found["cache"], "--redis-url").startswith("redis://127.0.0.1:")
    assert not [name for name, spec in found.items() if "--insecure-network" in spec.argv]
    probe = found["worker-1"].probe
    assert isinstance(probe, GrpcServing)
    assert probe.tls is not None
    assert probe.address.host == "10.0.0.3"


def test_without_tls_it_is_said_to_every_service() -> None:
    found = children(plan(on_ray(certs=None, insecure_network=True)))
    without = [name for name, spec in found.items() if "--insecure-network" not in spec.argv]
    assert without == ["valkey"]


def test_a_worker_that_moves_is_told_its_new_address_and_the_old_cache() -> None:
    options = on_ray()
    worker = children(plan(options))["worker-1"]
    assert worker.moved is not None
    moved = worker.moved(places_on({**NODES, "worker-1": "10.0.0.9"}, options)["worker-1"])
    assert flag(moved, "--session-address").startswith("10.0.0.9:")
    assert (flag(moved, "--cache"), flag(moved, "--worker-id")) == ("10.0.0.1:1000", "worker-1")
    assert moved.moved is not None
    for name in ("cache", "scheduler", "valkey"):
        assert children(plan(options))[name].moved is None, "others were told its address"


def test_on_this_machine_of_a_cluster_rest_is_on_loopback() -> None:
    found = children(plan(on_ray("auto", tenants=None)))
    assert flag(found["scheduler"], "--host") == "127.0.0.1"
    assert flag(found["cache"], "--session-address").startswith("10.0.0.1:")


def test_welcome_says_what_the_set_up_is() -> None:
    text = "\n".join(welcome(plan(on_ray()), on_ray()))
    assert "a Ray cluster, TLS between services alone, nothing is kept" in text
    assert "/logs of each node" in text
    assert "https://10.0.0.1:1003/metrics" in text or "https://10.0.0.1:1002/metrics" in text


THREE = [Node("a", 4, 2), Node("b", 4, 2), Node("c", 4, 0)]


@pytest.mark.parametrize(
    ("front", "worker", "num_workers", "fits"),
    [
        (Bundle(1, 0), Bundle(1, 1), 4, True),
        (Bundle(1, 0), Bundle(1, 1), 5, False),
        (Bundle(1, 0), Bundle(1, 2), 2, True),
        (Bundle(1, 0), Bundle(1, 3), 1, False),
        (Bundle(1, 0), Bundle(4, 0), 2, True),
        (Bundle(1, 0), Bundle(4, 0), 3, False),
        (Bundle(0, 0, "c"), Bundle(4, 0), 3, True),
        (Bundle(1, 0, "c"), Bundle(2, 1), 4, True),
        (Bundle(1, 0, "b"), Bundle(2, 1), 4, False),
        (Bundle(0, 0, "elsewhere"), Bundle(1, 0), 1, False),
        (Bundle(5, 0), Bundle(1, 0), 1, False),
    ],
)
def test_room(front: Bundle, worker: Bundle, num_workers: int, fits: bool) -> None:
    assert has_room(front, worker, num_workers, THREE) == fits


def test_what_is_asked_and_what_there_is_in_words() -> None:
    assert what_is_asked(Bundle(1, 0), Bundle(1, 2), 1) == (
        "1 CPU, 0 GPU for cache and scheduler, 1 CPU, 2 GPU for 1 worker"
    )
    assert what_is_asked(Bundle(1, 0), Bundle(1, 4), 2, nodes_each=2) == (
        "1 CPU, 0 GPU for cache and scheduler, 1 CPU, 4 GPU on each of 2 nodes for each of 2 workers"
    )
    assert what_is_asked(Bundle(1, 0), Bundle(1, 4), 1, nodes_each=2).endswith(
        "1 CPU, 4 GPU on each of 2 nodes for 1 worker"
    )
    assert what_is_asked(Bundle(1, 0), Bundle(1, 4), 2).endswith(", 1 CPU, 4 GPU for each of 2 workers")
    assert what_there_is([]) == "no node"
    assert what_there_is(THREE[:1], {"CPU": 0.5}) == ("1 node (a: 4 CPU, 2 GPU), of which 0.5 CPU, 0 GPU is free")


@pytest.mark.parametrize(
    ("more", "asked", "hint"),
    [
        (
            {"gpus_per_worker": 4},
            "3 CPU, 4 GPU for each of 2 workers",
            "--workers, --gpus-per-worker or --threads, or add nodes",
        ),
        (
            {"gpus_per_worker": 4, "nodes_per_worker": 2},
            "3 CPU, 2 GPU on each of 2 nodes for each of 2 workers",
            "--workers, --gpus-per-worker or --threads, more --nodes-per-worker (fewer GPUs of each), or add nodes",
        ),
        (
            {"tensor_parallel": 4, "nodes_per_worker": 2},
            "3 CPU, 0 GPU on each of 2 nodes for each of 2 workers",
            "--workers, --nodes-per-worker or --threads, or add nodes",
        ),
    ],
)
def test_a_cluster_that_is_too_small_is_told_with_what_helps(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, object], asked: str, hint: str
) -> None:
    monkeypatch.setattr(host, "connect", lambda on: None)
    monkeypatch.setattr(host, "living_nodes", lambda ray: THREE[:1])
    with pytest.raises(UnavailableError) as caught:
        host.RayHost("ray://head").place(needs_of(on_ray(threads=3, **more)))
    assert f"asked for 1 CPU, 0 GPU for cache and scheduler, {asked}; it has 1 node (" in caught.value.what
    assert caught.value.hint == f"give fewer {hint}"


def test_without_a_cluster_nothing_of_ray_is_imported(tmp_path: Path) -> None:
    """Of the whole way of `coppice up` to children that are ready."""
    code = """
import sys
from pathlib import Path
from coppice_cli import app, up
from coppice_up import stack
from coppice_up.display import display_for
from coppice_up.options import UpOptions
from coppice_up.plan import Services
from rich.console import Console
fake = ("-m", "tests.fakes.cache.service")
services = Services(cache=(*fake, "cache"), worker=(*fake, "worker"), scheduler=(*fake, "scheduler"))
with stack.running_stack(UpOptions(port=0), display_for(Console()), services):
    print("imported", sorted(name for name in sys.modules if name.split(".")[0] == "ray" or "on_ray" in name))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "imported []" in ended.stdout.splitlines(), ended


class FakeRay:
    """Fails as often as it is told to, as Ray does."""

    def __init__(self, text: str, times: int) -> None:
        self.text = text
        self.times = times
        self.addresses: list[str] = []

    def init(self, address: str, **given: object) -> None:
        self.addresses.append(address)
        if len(self.addresses) <= self.times:
            raise ConnectionAbortedError(f"Initialization failure from server:\nTraceback:\n{self.text}\n\n")


FORK = "RuntimeError: Starting Ray client server failed. See ray_client_server_23000.err for detailed logs."
ZOMBIE = "psutil.ZombieProcess: PID still exists but it's a zombie (pid=10035)"


@pytest.mark.parametrize(
    ("text", "times", "attempts", "error"),
    [
        (FORK, 0, 1, ""),
        (FORK, ATTEMPTS - 1, ATTEMPTS, ""),
        (FORK, ATTEMPTS, ATTEMPTS, FORK),
        (ZOMBIE, 1, 2, ""),
        ("RuntimeError: version mismatch", 1, 1, "RuntimeError: version mismatch"),
    ],
)
def test_a_head_whose_fork_died_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, text: str, times: int, attempts: int, error: str
) -> None:
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "")  # restored afterwards
    ray = FakeRay(text, times)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with (
        socket.create_server(("127.0.0.1", 0)) as head,
        nullcontext() if not error else pytest.raises(UnavailableError) as caught,
    ):
        port = head.getsockname()[1]
        connect(f"ray://127.0.0.1:{port}")
    assert len(ray.addresses) == attempts
    if error:
        assert caught is not None
        assert caught.value.what == f"cannot connect to Ray at 127.0.0.1:{port}: {error}"
