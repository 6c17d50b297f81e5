"""A child that keeps dying: it is given up while another one of its role goes on, else it ends the stack."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from coppice_up import supervisor as supervisor_module
from coppice_up.display import PlainDisplay
from coppice_up.host import ChildSpec
from coppice_up.local_host import LocalHost
from coppice_up.supervisor import ChildFailed, Supervisor
from tests.fakes.waiting import WAIT_S, wait_for

CRASHES_WHEN_TOLD = """
import pathlib, sys, time
print("it runs", flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("it is on fire", flush=True)
sys.exit(3)
"""
Supervise = Callable[..., Supervisor]


class Said:
    """What a user sees, and who is told to crash."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.screen = io.StringIO()
        self.display = PlainDisplay(Console(file=self.screen))

    def text(self) -> str:
        return self.screen.getvalue()

    def spec(self, name: str, role: str = "", probe: Callable[[], bool] | None = None) -> ChildSpec:
        """Ready when it runs, unless `probe` says so."""
        log = self.folder / f"{name}.log"
        argv = (sys.executable, "-c", CRASHES_WHEN_TOLD, str(self.folder / name))
        return ChildSpec(name, argv, probe or (lambda: "it runs" in log.read_text()), log, role=role)

    def crash(self, name: str) -> None:
        """At once, and whenever it is started again."""
        (self.folder / name).touch()


@pytest.fixture
def said(tmp_path: Path) -> Said:
    return Said(tmp_path)


@pytest.fixture
def supervise(said: Said, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervise]:
    """Children that may be started again twice."""
    monkeypatch.setattr(supervisor_module, "RESTARTS_MAX", 2)
    monkeypatch.setattr(supervisor_module, "RESTART_WINDOW_S", 3600.0)
    monkeypatch.setattr(supervisor_module, "RESTART_PAUSE_S", 0.0)
    made: list[Supervisor] = []

    def make(*specs: ChildSpec) -> Supervisor:
        made.append(Supervisor([specs], LocalHost(), said.display))
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.stop()


def tick_until(supervisor: Supervisor, said: Said, text: str) -> None:
    def look() -> bool:
        supervisor.tick()
        return text in said.text()

    wait_for(look, text)


def failure(supervisor: Supervisor) -> str:
    """Why the stack ends."""
    failures: list[str] = []

    def look() -> bool:
        try:
            supervisor.tick()
        except ChildFailed as failed:
            failures.append(failed.line())
        return bool(failures)

    wait_for(look, "the end of the stack")
    return failures[0]


def test_a_worker_that_keeps_dying_is_given_up_and_said_once(said: Said, supervise: Supervise) -> None:
    supervisor = supervise(*(said.spec(name, "worker") for name in ("worker-0", "worker-1", "worker-2")))
    assert supervisor.start()
    said.crash("worker-1")
    tick_until(supervisor, said, "not started again")
    before = said.text()
    assert "worker-1 died again after 2 restarts within 3600 s (exit code 3)" in before
    assert "the stack goes on with worker-0, worker-2 (" in before
    assert f"all of them in {said.folder}/worker-1.log; put right what they name" in before
    assert before.count("worker-1 | it is on fire") >= 3
    for _ in range(20):
        supervisor.tick()
    assert said.text() == before


def test_a_worker_that_cannot_start_is_tried_once_more_and_given_up(said: Said, supervise: Supervise) -> None:
    said.crash("worker-1")
    never_ready = said.spec("worker-1", "worker", lambda: False)
    supervisor = supervise(said.spec("worker-0", "worker"), never_ready, said.spec("scheduler"))
    assert supervisor.start()
    assert "worker-1 is started again (1 of 2 a minute)" in said.text()
    assert "worker-1 died again while it started (exit code 3); it is not started again" in said.text()
    assert "the stack goes on with worker-0 (" in said.text()
    said.crash("worker-0")
    assert failure(supervisor).startswith("worker-0 died again after 2 restarts")


def test_workers_that_all_cannot_start_end_the_stack_at_once(said: Said, supervise: Supervise) -> None:
    for name in ("worker-0", "worker-1"):
        said.crash(name)
    never = supervise(*(said.spec(name, "worker", lambda: False) for name in ("worker-0", "worker-1")))
    with pytest.raises(ChildFailed, match=r"worker-[01] died while it started \(exit code 3\)"):
        never.start()
    assert "started again" not in said.text()


@pytest.mark.parametrize("names", [("worker-0", "worker-1"), ("worker-1",)])
def test_a_worker_that_is_never_ready_is_given_up_where_another_one_is(
    said: Said, supervise: Supervise, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr(supervisor_module, "START_TIMEOUT_S", 1.0)
    probes = {"worker-0": lambda: True, "worker-1": lambda: False}  # the first one is ready however slow its start is
    supervisor = supervise(*(said.spec(name, "worker", probes[name]) for name in names))
    if len(names) == 1:
        with pytest.raises(ChildFailed, match="worker-1 runs but was not ready within 1 s"):
            supervisor.start()
        return
    assert supervisor.start()
    assert "worker-1 runs but was not ready within 1 s; it is not started again" in said.text()
    assert not supervisor._all()[1].child.is_running()


def test_a_request_to_stop_is_heard_at_once(said: Said, supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = supervise(said.spec("cache"))
    assert supervisor.start()
    monkeypatch.setattr(supervisor_module, "TICK_S", 3600.0)
    watching = threading.Thread(target=supervisor.watch, daemon=True)
    watching.start()
    supervisor.request_stop()
    watching.join(WAIT_S)
    assert not watching.is_alive()


def test_the_last_worker_ends_the_stack(said: Said, supervise: Supervise) -> None:
    supervisor = supervise(*(said.spec(name, "worker") for name in ("worker-0", "worker-1")), said.spec("scheduler"))
    assert supervisor.start()
    said.crash("worker-0")
    tick_until(supervisor, said, "the stack goes on with worker-1 (")
    said.crash("worker-1")
    assert failure(supervisor).startswith("worker-1 died again after 2 restarts within 3600 s (exit code 3)")


def test_who_is_alone_in_its_role_ends_the_stack(said: Said, supervise: Supervise) -> None:
    supervisor = supervise(said.spec("worker-0", "worker"), said.spec("cache"), said.spec("scheduler"))
    assert supervisor.start()
    said.crash("cache")
    assert failure(supervisor).startswith("cache died again after 2 restarts")
    assert "not started again" not in said.text()


def test_a_start_does_not_wait_for_a_child_that_was_given_up(said: Said, supervise: Supervise) -> None:
    def ready_then_crashes() -> bool:
        runs = "it runs" in (said.folder / "worker-1.log").read_text()
        if runs:
            said.crash("worker-1")
        return runs

    supervisor = supervise(
        said.spec("worker-0", "worker"),
        said.spec("worker-1", "worker", ready_then_crashes),
        said.spec("scheduler", probe=lambda: "not started again" in said.text()),
    )
    in_vain = threading.Timer(WAIT_S, supervisor.request_stop)
    in_vain.daemon = True
    in_vain.start()
    assert supervisor.start()
    in_vain.cancel()
    assert "the stack goes on with worker-0 (" in said.text()
