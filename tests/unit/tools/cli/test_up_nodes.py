"""Workers on several nodes: what is planned for each node, and how they are started again and given up together."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from coppice.addresses import Address
from coppice.errors import UsageError
from coppice_up import supervisor as supervisor_module
from coppice_up.checkpoint import Checkpoint
from coppice_up.display import PlainDisplay
from coppice_up.host import Child, ChildSpec, Needs, Place
from coppice_up.on_ray.agent import Agent
from coppice_up.options import UpOptions
from coppice_up.plan import Services, needs_of, plan_stack
from coppice_up.probe import Runs
from coppice_up.supervisor import ChildFailed, Supervisor
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


# ---- what the supervisor makes of them ----


class FakeChild:
    """Runs until it is told that it died."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.node = "here"
        self.exit = ""
        self.answers = True
        self.starts = 1

    def is_running(self) -> bool:
        return not self.exit

    def is_ready(self) -> bool:
        return self.is_running() and self.answers

    def describe_exit(self) -> str:
        return self.exit

    def restart(self, spec: ChildSpec | None = None) -> None:
        assert self.exit
        self.spec = spec or self.spec
        self.exit = ""
        self.starts += 1

    def terminate(self) -> None:
        self.exit = "exit code 0"

    def kill(self) -> None:
        self.exit = "killed"

    def new_lines(self) -> list[str]:
        return []

    def last_lines(self, count: int) -> list[str]:
        return []


class FakeHost:
    def __init__(self) -> None:
        self.children: dict[str, FakeChild] = {}

    def place(self, needs: Sequence[Needs]) -> dict[str, Place]:
        raise AssertionError("all have places")

    def start(self, spec: ChildSpec) -> Child:
        self.children[spec.name] = FakeChild(spec)
        return self.children[spec.name]

    def close(self, *, keep_logs: bool) -> None:
        pass


def spec(name: str, leader: str = "", meets_at: Address | None = None) -> ChildSpec:
    met = meets_at or Address("10.0.0.1", 5)
    led = (lambda address: spec(name, leader, address)) if leader else None
    return ChildSpec(name, (name,), Runs(), Path(f"/{name}"), role="worker", leader=leader, meets_at=met, led=led)


class Cell:
    """Workers on two nodes each, and who tends them."""

    def __init__(self, num_workers: int) -> None:
        self.host = FakeHost()
        self.screen = io.StringIO()
        specs = [
            each
            for index in range(num_workers)
            for each in (spec(f"worker-{index}"), spec(f"worker-{index}-1", f"worker-{index}"))
        ]
        self.supervisor = Supervisor([specs], self.host, PlainDisplay(Console(file=self.screen, width=200)))
        assert self.supervisor.start()

    def __getitem__(self, name: str) -> FakeChild:
        return self.host.children[name]

    def said(self) -> str:
        return self.screen.getvalue()

    def fail(self, *names: str) -> None:
        for name in names:
            self[name].exit = "exit code 1"
        self.supervisor.tick()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "RESTARTS_MAX", 2)
    monkeypatch.setattr(supervisor_module, "RESTART_PAUSE_S", 0.0)


def test_a_node_is_ready_when_its_leader_is() -> None:
    cell = Cell(1)
    cell["worker-0"].answers = False
    cell.fail("worker-0", "worker-0-1")
    before = cell.said().count("ready")
    for _ in range(3):
        cell.supervisor.tick()
    assert cell.said().count("ready") == before
    cell["worker-0"].answers = True
    cell.supervisor.tick()
    assert cell.said().count("ready") == before + 2


def test_nodes_follow_a_leader_that_has_moved_which_is_no_crash() -> None:
    cell = Cell(1)
    for number in range(1, 5):
        cell["worker-0"].spec = spec("worker-0", meets_at=Address("10.0.0.2", number))
        if number % 2:
            cell["worker-0-1"].exit = "exit code 1"  # it has lost its leader already
        cell.supervisor.tick()
        assert cell["worker-0-1"].spec.meets_at == Address("10.0.0.2", number)
        assert cell["worker-0-1"].starts == number + 1
    assert "worker-0-1 is started again, since worker-0 runs on here now" in cell.said()
    assert "of 2 a minute" not in cell.said()
    cell.supervisor.tick()
    assert cell["worker-0-1"].starts == 5, "it follows once"


def test_a_node_that_only_we_have_lost_is_looked_for_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(1)
    cell.fail("worker-0-1")
    assert cell["worker-0-1"].starts == 1
    monkeypatch.setattr(supervisor_module, "LEADER_ENDS_S", 0.0)
    cell.supervisor.tick()
    cell.supervisor.tick()
    assert (cell["worker-0"].starts, cell["worker-0-1"].starts) == (1, 2)
    assert cell.said().count("worker-0-1 is ready") == 2


def test_a_node_that_dies_is_started_again_after_its_leader() -> None:
    cell = Cell(1)
    cell.fail("worker-0-1")
    cell.supervisor.tick()
    assert cell["worker-0-1"].starts == 1
    cell.fail("worker-0")
    assert (cell["worker-0"].starts, cell["worker-0-1"].starts) == (2, 2)
    assert cell.said().count("worker-0-1 died (exit code 1)") == 1


def test_a_death_is_not_counted_where_the_leader_turns_out_to_have_moved() -> None:
    cell = Cell(1)
    cell.fail("worker-0", "worker-0-1")
    assert "worker-0-1 is started again (1 of 2 a minute)" in cell.said()
    cell["worker-0"].spec = spec("worker-0", meets_at=Address("10.0.0.2", 5))
    cell.supervisor.tick()
    cell.fail("worker-0", "worker-0-1")
    assert cell.said().count("worker-0-1 is started again (1 of 2 a minute)") == 2
    assert "worker-0 is started again (2 of 2 a minute)" in cell.said()


def test_a_worker_is_given_up_with_all_its_nodes() -> None:
    cell = Cell(2)
    cell["worker-0"].answers = False
    cell.fail("worker-0", "worker-0-1")
    for _ in range(2):
        cell.fail("worker-0-1")
    assert "worker-0-1 died again after 2 restarts" in cell.said()
    assert "; worker-0 is not started again, the stack goes on with worker-1 (" in cell.said()
    assert cell["worker-0"].exit == "killed"
    cell.supervisor.tick()
    assert cell["worker-0"].starts == 2
    for _ in range(2):
        cell.fail("worker-1")
    with pytest.raises(ChildFailed, match=r"worker-1 died again after 2 restarts"):
        cell.fail("worker-1")


def test_nodes_of_one_worker_do_not_stand_in_for_each_other() -> None:
    cell = Cell(1)
    cell["worker-0"].answers = False
    cell.fail("worker-0", "worker-0-1")
    cell.fail("worker-0-1")
    with pytest.raises(ChildFailed, match="worker-0-1 died again after 2 restarts"):
        cell.fail("worker-0-1")
