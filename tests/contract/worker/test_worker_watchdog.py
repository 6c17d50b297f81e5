"""A device that hangs ends its worker, although the threads of its links go on."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coppice.ids import CacheEpoch, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.registration import Registered
from coppice.messages.step import StepPlan
from coppice_worker.core.batch.step_batch import PoolSpec, StepBatch, StepOutput
from coppice_worker.core.batch.steps import WorkerCoreSettings
from coppice_worker.core.worker import WorkerCore
from coppice_worker.edge.runner import StepObserver, StepRunner
from coppice_worker.edge.watchdog import StepWatchdog
from tests.contract.worker.test_worker_service import CountingExecutor, handle, start, u32
from tests.fakes.waiting import WAIT_S

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 0.2


class HangingExecutor(CountingExecutor):
    """Computes nothing until it is let go."""

    pool = PoolSpec(num_blocks=8, block_size=4)

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Event()
        self.let_go = threading.Event()

    def execute(self, batch: StepBatch) -> StepOutput:
        self.began.set()
        self.let_go.wait(WAIT_S)
        return super().execute(batch)


class Hanging:
    """A runner with a plan in its device."""

    def __init__(self) -> None:
        core = WorkerCore(
            WorkerCoreSettings(WorkerId("w0"), "here:0", HangingExecutor.pool, Namespace(b"n"), "counter")
        )
        self.core = core
        core.registered(Registered(WorkerEpoch(1), CacheEpoch(1)))
        core.attach_scheduler(SchedulerEpoch(1))
        self.executor = HangingExecutor()
        self.results: list[Any] = []
        self.runner = StepRunner(core, self.executor, StepObserver(), self.results.append)
        self.runner.start()

    def step(self) -> None:
        plan = StepPlan(1, attach=(start(1, 2, handle(3)),), rows=u32(1), row_tokens=u32(2))
        self.runner.step(SchedulerEpoch(1), plan, lambda: True, self.results.append, self.results.append)
        assert self.executor.began.wait(WAIT_S)

    def close(self) -> None:
        self.executor.let_go.set()
        self.runner.stop()


@pytest.fixture
def hanging(keep: Callable[[Hanging], Hanging]) -> Hanging:
    return keep(Hanging())


def test_a_step_that_hangs_is_noticed(hanging: Hanging, keep: Callable[[Any], Any]) -> None:
    hung = threading.Event()
    keep(StepWatchdog(hanging.runner, TIMEOUT_S, hung.set)).start()
    hanging.step()
    assert hung.wait(WAIT_S)


def test_time_counts_from_the_step_that_runs(hanging: Hanging) -> None:
    assert hanging.runner.busy_ns(1 << 62) == 0, "nothing runs"
    hanging.step()
    assert hanging.runner.busy_ns(1 << 62) > 0
    hanging.executor.let_go.set()
    assert hanging.runner.ask(lambda core: core.stats().steps, WAIT_S) == 1
    hanging.runner.stop()
    assert hanging.runner.busy_ns(1 << 62) == 0, "it is done"


def test_the_process_ends_with_exit_code_1() -> None:
    code = (
        "from tests.contract.worker.test_worker_watchdog import *; h = Hanging();"
        f"StepWatchdog(h.runner, {TIMEOUT_S}).start(); h.step(); h.executor.let_go.wait()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1
    assert "--step-timeout-s" in done.stderr
    assert "Traceback" not in done.stderr
