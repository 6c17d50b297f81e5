"""A worker process that is told to end while a sequence runs that its scheduler never ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coppice.ids import WorkerEpoch
from coppice.messages.registration import Draining, Register
from coppice.messages.step import StepPlan
from coppice.session.link import Attached
from tests.contract.worker.test_worker_service import Planner, handle, start, u32
from tests.fakes.cache.registrar import Registrar
from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.waiting import wait_for

WAIT_S = 60.0


@pytest.fixture
def registrar() -> Iterator[Registrar]:
    registrar = Registrar()
    yield registrar
    registrar.close()


Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start_worker(tmp_path: Path, registrar: Registrar) -> Iterator[Start]:
    """With one more flag. Its log is the file "log" in `tmp_path`."""
    model = write_tiny_checkpoint(tmp_path / "tiny")
    started: list[subprocess.Popen[bytes]] = []

    def begin(flag: str) -> subprocess.Popen[bytes]:
        ports = ["--session-port=0", "--grpc-port=0", "--http-port=0"]
        args = [f"--model={model}", f"--cache={registrar.address}", "--device=cpu", "--num-blocks=8", *ports, flag]
        args += ["--block-size=4", "--threads=1", "--kernels=torch"]
        with (tmp_path / "log").open("wb") as log:
            started.append(subprocess.Popen([sys.executable, "-m", "coppice_worker", *args], stderr=log))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait(WAIT_S)


@pytest.fixture
def attached(registrar: Registrar) -> Iterator[Callable[[], Planner]]:
    """A scheduler at the worker that registers next."""
    planners: list[Planner] = []

    def attach() -> Planner:
        message = registrar.received.get(timeout=WAIT_S)
        assert isinstance(message, Register)
        planners.append(Planner(message.address, epoch=7))
        planners[-1].next(Attached)
        return planners[-1]

    yield attach
    for planner in planners:
        planner.close()


def test_a_second_signal_cuts_what_the_first_one_waits_for(
    start_worker: Start, attached: Callable[[], Planner], registrar: Registrar, tmp_path: Path
) -> None:
    process = start_worker("--drain-s=3600")
    planner = attached()
    planner.step(StepPlan(1, attach=(start(1, 2, handle(3)),), rows=u32(1), row_tokens=u32(2)))
    process.send_signal(signal.SIGTERM)
    assert registrar.received.get(timeout=WAIT_S) == Draining(WorkerEpoch(1))
    assert planner.step(StepPlan(2, rows=u32(1), row_tokens=u32(1))).sampled_ids == u32(1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
    log = (tmp_path / "log").read_text()
    assert "stopping: 1 running sequences get 3600 s to end" in log
    assert "1 running sequences are cut" in log


@pytest.mark.wide
def test_what_runs_is_cut_when_its_time_is_up(
    start_worker: Start, attached: Callable[[], Planner], tmp_path: Path
) -> None:
    process = start_worker("--drain-s=0.1")
    attached().step(StepPlan(1, attach=(start(1, 2, handle(3)),), rows=u32(1), row_tokens=u32(2)))
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0
    wait_for(lambda: "1 running sequences are cut" in (tmp_path / "log").read_text(), "a word about it")
