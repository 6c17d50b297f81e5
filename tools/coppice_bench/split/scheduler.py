"""`python -m coppice_bench.split.scheduler CACHE MAX_CONTEXT`: the planner as it ships, and the driver where requests
enter it.

A line with a `Load` runs a round and answers with what was measured.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from coppice.errors import CoppiceError
from coppice_bench.split.commands import serve_commands
from coppice_bench.split.load import Driver, Load, Recorder, sleep_until
from coppice_bench.split.parts import scheduler_settings
from coppice_scheduler.core.engine import SchedulerCore
from coppice_scheduler.core.state.request import Effects, Request
from coppice_scheduler.edge.planner.planner import Planner

_log = logging.getLogger(__name__)
READY_S = 60.0


class PlannerContender:
    """Implements `Contender` on the planner and its sessions."""

    def __init__(self, cache: str, max_context: int, recorder: Recorder) -> None:
        self._recorder = recorder
        core = SchedulerCore(scheduler_settings(max_context, max_steps_in_flight=2))
        self._planner = Planner(core, cache, "bench", self._deliver, _failed)
        self._planner.start()

    def wait_ready(self) -> None:
        ends_s = time.monotonic() + READY_S
        while self._planner.problems:
            if time.monotonic() > ends_s:
                raise CoppiceError(f"the split stack did not come up: {'; '.join(self._planner.problems)}")
            time.sleep(0.05)

    def submit(self, request: Request) -> None:
        self._planner.later(lambda: self._submit(request))

    def cancel(self, request_id: str) -> None:
        self._planner.later(lambda: self._planner.core.cancel(request_id, time.monotonic_ns()))

    def run_until(self, due_ns: int) -> None:
        sleep_until(due_ns)

    def stop(self) -> None:
        self._planner.stop()

    def _submit(self, request: Request) -> None:
        refused = self._planner.core.submit(request, time.monotonic_ns())
        if refused is not None:
            self._recorder.refused(refused.message)

    def _deliver(self, effects: Effects) -> None:
        self._recorder.told(effects.tokens, effects.outputs)


def main(cache: str, max_context: int) -> None:
    recorder = Recorder()
    contender = PlannerContender(cache, max_context, recorder)
    contender.wait_ready()
    driver = Driver(contender, recorder)

    def handle(command: dict[str, Any]) -> dict[str, Any]:
        return asdict(driver.run(Load(**command)))

    serve_commands(handle)
    contender.stop()


def _failed(error: BaseException) -> None:
    _log.error("the planner failed: %s", error)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
