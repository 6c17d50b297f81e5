"""`python -m coppice_bench.split.single STEPS_IN_FLIGHT [CHECKPOINT]`: the three cores in one process, and the driver
beside them.

Without a checkpoint its steps sleep. A line with a `Load` runs a round and answers with what was measured.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from coppice_bench.split.commands import serve_commands
from coppice_bench.split.load import Driver, Load, Recorder, sleep_until
from coppice_bench.split.parts import index_settings, scheduler_settings, sleeping_worker, torch_worker
from coppice_bench.split.sleeper import SleepingExecutor
from coppice_offline.engine import EngineSettings, LocalEngine
from coppice_scheduler.core.state.request import Request


class LocalContender:
    """Implements `Contender`: whatever is due is submitted between two steps."""

    def __init__(self, engine: LocalEngine, recorder: Recorder) -> None:
        self._engine = engine
        self._recorder = recorder

    def submit(self, request: Request) -> None:
        refused = self._engine.submit(request)
        if refused is not None:
            self._recorder.refused(refused.message)

    def cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)

    def run_until(self, due_ns: int) -> None:
        while not self._engine.is_idle:
            if perf_counter_ns() >= due_ns:
                return
            told = self._engine.advance()
            self._recorder.told(told.tokens, told.outputs)
            self._engine.step()
        sleep_until(due_ns)


def main(max_steps_in_flight: int, checkpoint: Path | None) -> None:
    executor, worker = sleeping_worker("here") if checkpoint is None else torch_worker(checkpoint)
    scheduler = scheduler_settings(worker.max_context, max_steps_in_flight)
    engine = LocalEngine(executor, EngineSettings(index_settings(), scheduler, worker), time.monotonic_ns)
    recorder = Recorder()
    driver = Driver(LocalContender(engine, recorder), recorder)

    def handle(command: dict[str, Any]) -> dict[str, Any]:
        load = Load(**command)
        if isinstance(executor, SleepingExecutor):
            executor.step_ns = int(load.step_ms * 1e6)
        return asdict(driver.run(load))

    serve_commands(handle)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
