"""Workers on several nodes: they are ready, started again and given up as a whole."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from coppice.addresses import Address
from coppice_up import supervisor as supervisor_module
from coppice_up.display import PlainDisplay
from coppice_up.host import Child, ChildSpec, Needs, Place
from coppice_up.probe import Runs
from coppice_up.supervisor import ChildFailed, Supervisor


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
    """Workers on two nodes each, and who tends them. With `is_ready` False no leader is ready: they all load."""

    def __init__(self, num_workers: int, *, is_ready: bool = True) -> None:
        self.host = FakeHost()
        self.screen = io.StringIO()
        specs = [
            each
            for index in range(num_workers)
            for each in (spec(f"worker-{index}"), spec(f"worker-{index}-1", f"worker-{index}"))
        ]
        self.supervisor = Supervisor([specs], self.host, PlainDisplay(Console(file=self.screen, width=200)))
        if is_ready:
            assert self.supervisor.start()
            return
        self.supervisor.request_stop()  # so that its ticks are ours
        assert not self.supervisor.start()
        for index in range(num_workers):
            self[f"worker-{index}"].answers = False

    def __getitem__(self, name: str) -> FakeChild:
        return self.host.children[name]

    def said(self) -> str:
        return self.screen.getvalue()

    def fail(self, *names: str) -> None:
        for name in names:
            self[name].exit = "exit code 1"
        self.supervisor.tick()

    def fail_for_good(self, *names: str) -> str:
        """Why the stack ends in the same tick."""
        with pytest.raises(ChildFailed) as caught:
            self.fail(*names)
        assert "goes on with" not in self.said()
        return caught.value.what


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


@pytest.mark.parametrize(
    "names",
    [("worker-0", "worker-1"), ("worker-0-1", "worker-1-1"), ("worker-0", "worker-1-1"), ("worker-1", "worker-0-1")],
)
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one after the other"])
def test_workers_that_all_have_lost_a_node_at_their_first_start_end_the_stack_promptly(
    names: tuple[str, ...], at_once: bool
) -> None:
    """Their other nodes run, and wait in vain."""
    cell = Cell(2, is_ready=False)
    if not at_once:
        cell.fail(names[0])
        for _ in range(3):
            cell.supervisor.tick()
        names = names[1:]
    assert "died while it started (exit code 1)" in cell.fail_for_good(*names)
    assert {child.starts for child in cell.host.children.values()} == {1}


def test_the_last_of_three_workers_that_has_all_its_nodes_is_waited_for() -> None:
    cell = Cell(3, is_ready=False)
    cell.fail("worker-0-1", "worker-2")
    cell.supervisor.tick()
    assert "worker-0-1 died while it started" in cell.fail_for_good("worker-1-1")


@pytest.mark.parametrize("lost", ["worker-0", "worker-0-1"])
def test_a_node_that_dies_at_its_first_start_is_started_again_when_another_worker_is_ready(lost: str) -> None:
    cell = Cell(2, is_ready=False)
    cell.fail(lost)
    for _ in range(3):
        cell.supervisor.tick()
    assert cell[lost].starts == 1, "it may have died of what all die of"
    cell["worker-1"].answers = True
    cell.supervisor.tick()
    cell.supervisor.tick()
    assert cell[lost].starts == 2
    cell["worker-0"].answers = True
    cell.supervisor.tick()
    assert {f"{name} is ready" in cell.said() for name in cell.host.children} == {True}
    assert "given up" not in cell.said()


def test_a_single_worker_that_loses_a_node_at_its_first_start_ends_the_stack_at_once() -> None:
    assert Cell(1, is_ready=False).fail_for_good("worker-0-1") == "worker-0-1 died while it started (exit code 1)"


def test_a_worker_that_was_ready_is_waited_for_though_it_has_lost_a_node() -> None:
    cell = Cell(2, is_ready=False)
    cell["worker-1"].answers = True
    cell.supervisor.tick()
    cell.fail("worker-1-1")
    assert cell["worker-1-1"].starts == 1, "it waits for the end of its leader"
    cell.fail("worker-0", "worker-1")
    assert (cell["worker-1"].starts, cell["worker-1-1"].starts) == (2, 2)
    cell.supervisor.tick()
    assert cell["worker-0"].starts == 2


def test_the_stack_does_not_go_on_with_a_worker_that_has_lost_a_node_at_its_first_start() -> None:
    cell = Cell(2, is_ready=False)
    cell["worker-0"].answers = True
    cell.supervisor.tick()
    cell["worker-0"].answers = False
    cell.fail("worker-0")
    cell.fail("worker-1-1")
    cell.fail("worker-0")
    assert cell.fail_for_good("worker-0") == "worker-0 died again after 2 restarts within 60 s (exit code 1)"


@pytest.mark.parametrize("was_ready", [True, False])
def test_a_worker_that_hangs_is_not_waited_for_where_the_other_has_lost_a_node(
    monkeypatch: pytest.MonkeyPatch, was_ready: bool
) -> None:
    cell = Cell(2, is_ready=False)
    if was_ready:
        cell["worker-0"].answers = True
        cell.supervisor.tick()
        cell["worker-0"].answers = False
        cell.fail("worker-0")
    cell.fail("worker-1-1")
    monkeypatch.setattr(supervisor_module, "START_TIMEOUT_S", 0.0)
    assert cell.fail_for_good() == "worker-0 runs but was not ready within 0 s"
