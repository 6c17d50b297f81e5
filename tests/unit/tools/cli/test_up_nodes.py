"""Workers on several nodes: what is planned for each node, and what its agent does with that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coppice.addresses import Address
from coppice.errors import UsageError
from coppice_up.checkpoint import Checkpoint
from coppice_up.host import ChildSpec, Needs, Place
from coppice_up.on_ray.agent import Agent
from coppice_up.options import UpOptions
from coppice_up.plan import Services, needs_of, plan_stack
from coppice_up.probe import Runs
from tests.fakes.waiting import wait_for

SERVICES = Services(cache=("cache",), worker=("worker",), scheduler=("scheduler",))


def on_nodes(nodes_per_worker: int = 2, **more: object) -> UpOptions:
    given: dict[str, object] = {"tensor_parallel": 4, "certs": Path("/certs"), **more}
    return UpOptions(on="auto", nodes_per_worker=nodes_per_worker, **given)  # type: ignore[arg-type]


def place(needs: Needs, node: str) -> Place:
    addresses = {port.name: Address(port.host or node, 1000 + index) for index, port in enumerate(needs.ports)}
    return Place(node, "python", addresses, Path("/logs"), None, Checkpoint(Path("/model"), "m"))


def planned(options: UpOptions) -> dict[str, ChildSpec]:
    """Each child on a node of its own."""
    places = {needs.name: place(needs, f"10.0.0.{index}") for index, needs in enumerate(needs_of(options))}
    return {spec.name: spec for stage in plan_stack(options, places, {}, SERVICES).stages for spec in stage}


def flag(spec: ChildSpec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (UpOptions(nodes_per_worker=2), "--nodes-per-worker is for a cluster (give --on ray://HEAD or --on auto, too)"),
        (on_nodes(0), "--nodes-per-worker 0 is too few"),
        (
            on_nodes(3),
            "4 processes of a worker cannot be shared out evenly among --nodes-per-worker 3 (give a multiple",
        ),
        (on_nodes(2, tensor_parallel=1), "1 process of a worker cannot be shared out evenly among"),
    ],
)
def test_what_cannot_work_is_refused(options: UpOptions, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        options.check()
    assert words in caught.value.line()


@pytest.mark.parametrize("gpus", [{"gpus_per_worker": 4, "tensor_parallel": 1}, {"device": "cuda"}])
def test_each_node_reserves_its_share(gpus: dict[str, object]) -> None:
    options = on_nodes(2, workers=2, threads=3, **gpus)
    options.check()
    needs = {each.name: each for each in needs_of(options) if each.name.startswith("worker")}
    assert list(needs) == ["worker-0", "worker-0-1", "worker-1", "worker-1-1"]
    assert {(each.cpus, each.gpus) for each in needs.values()} == {(3, 2)}
    assert [each.group for each in needs.values()] == list(needs)
    assert [each.leader for each in needs.values()] == ["", "worker-0", "", "worker-1"]
    assert needs["worker-1-1"].ports == ()
    assert needs["worker-1-1"].files == needs["worker-1"].files, "it has the certificate of its worker"


def test_nodes_are_told_where_they_meet_and_which_they_are() -> None:
    found = planned(on_nodes(workers=2))
    for worker in ("worker-0", "worker-1"):
        leader, other = found[worker], found[f"{worker}-1"]
        alike = ("--nnodes", "--dist-init-addr", "--tensor-parallel", "--model", "--threads", "--block-size")
        assert {name: flag(leader, name) for name in alike} == {name: flag(other, name) for name in alike}
        assert [flag(each, "--node-rank") for each in (leader, other)] == ["0", "1"]
        assert flag(other, "--dist-init-addr") == str(leader.meets_at)
        assert leader.meets_at is not None
        assert leader.meets_at.host == flag(leader, "--host")
        assert (leader.leader, other.leader) == ("", worker)
        assert flag(other, "--tls-cert") == f"/certs/worker-{worker}.pem"
        assert "--cache" not in other.argv
    assert not [word for word in planned(on_nodes(1))["worker-0"].argv if word.startswith(("--nnodes", "--dist"))]


def test_a_node_follows_its_leader_and_moves_itself() -> None:
    other = planned(on_nodes())["worker-0-1"]
    assert other.led is not None
    led = other.led(Address("10.0.0.9", 7))
    assert (flag(led, "--dist-init-addr"), led.meets_at) == ("10.0.0.9:7", Address("10.0.0.9", 7))
    assert led.moved is not None
    needs = next(each for each in needs_of(on_nodes()) if each.name == "worker-0-1")
    moved = led.moved(replace(place(needs, "10.0.0.8"), program="python3"))
    assert (moved.argv[0], flag(moved, "--dist-init-addr")) == ("python3", "10.0.0.9:7")
    assert moved.led is not None
    led_there = moved.led(Address("10.0.0.7", 6))
    assert (led_there.argv[0], flag(led_there, "--dist-init-addr")) == ("python3", "10.0.0.7:6")


def test_an_agent_ends_what_runs_for_an_earlier_leader(tmp_path: Path) -> None:
    agent = Agent()

    def spec_of(leader: str) -> ChildSpec:
        argv = ("sh", "-c", "echo $0 $$; exec sleep 600", leader)
        return ChildSpec("worker-0-1", argv, Runs(), tmp_path / "log")

    def said() -> list[str]:
        return (tmp_path / "log").read_text().split()

    try:
        assert agent.start(spec_of("earlier")) is None
        wait_for(lambda: len(said()) == 2, "it to run")
        assert agent.start(spec_of("earlier")) is None
        assert agent.start(spec_of("later")) is None
        wait_for(lambda: len(said()) == 4, "the other one to run")
        assert [said()[0], said()[2]] == ["earlier", "later"]
        assert not Path(f"/proc/{said()[1]}").exists()
        status = agent.status(look_for_readiness=True)
        assert status is not None
        assert status.is_ready
    finally:
        agent.kill()
