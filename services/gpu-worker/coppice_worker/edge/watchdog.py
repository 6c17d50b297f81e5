"""Ends the process when its step thread hangs.

Heartbeats do not wait for steps, so a worker whose device hangs looks alive to everybody else for ever.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

_log = logging.getLogger(__name__)
EXIT_HUNG = 1
LOOKS_PER_TIMEOUT = 10


def exit_now() -> None:
    """End the process without cleaning up.

    A thread inside a device call that hangs can be neither interrupted nor joined, and an orderly end (of the
    interpreter, of the device's context) would wait for it for ever. Nothing is lost: the worker's epoch dies with the
    process, and everything on the device with the epoch.
    """
    os._exit(EXIT_HUNG)


class Busy(Protocol):
    def busy_ns(self, now_ns: int) -> int:
        """How long it has been at one step or copy. `now_ns` is `time.monotonic_ns`."""


class StepWatchdog:
    """Looks at the runner from a thread of its own; calls `hung` once when a step, or what is copied at once, takes
    longer than `timeout_s`."""

    def __init__(self, runner: Busy, timeout_s: float, hung: Callable[[], None] = exit_now) -> None:
        self._runner = runner
        self._timeout_s = timeout_s
        self._hung = hung
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._timeout_s / LOOKS_PER_TIMEOUT):
            busy_s = self._runner.busy_ns(time.monotonic_ns()) / 1e9
            if busy_s > self._timeout_s:
                _log.critical(
                    "a step or copy took %.1f s, more than --step-timeout-s %g: the device hangs; the process ends",
                    busy_s,
                    self._timeout_s,
                )
                self._hung()
                return
