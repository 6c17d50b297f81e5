"""The processes of `coppice bench split`: started, told what to do, ended."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from coppice.errors import CoppiceError
from coppice.processes.child_process import tethered
from coppice_bench.split.commands import load_to_line, measured_from_line
from coppice_bench.split.load import Load, Measured
from coppice_up.ports import free_addresses

_END_S = 15.0


class Process:
    """A child that answers each JSON line with one. It dies with this process."""

    def __init__(self, name: str, *argv: str, environment: dict[str, str] | None = None) -> None:
        self._name = name
        self._process = subprocess.Popen(
            tethered([sys.executable, *argv]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **(environment or {})},
        )

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Raises CoppiceError when the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise CoppiceError(f"the {self._name} of the benchmark has ended; see above") from None
        return self.hear()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CoppiceError(f"the {self._name} of the benchmark has ended; see above")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if error is not None or self._name in ("cache", "worker"):
            self._process.terminate()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Stack:
    """One contender: where rounds run, and who must hear of a step's length beside it."""

    def __init__(self, driver: Process, worker: Process | None) -> None:
        self._driver = driver
        self._worker = worker

    def run(self, load: Load) -> Measured:
        if self._worker is not None:
            self._worker.ask({"step_ms": load.step_ms})
        return measured_from_line(self._driver.ask(load_to_line(load)))


@contextmanager
def single_stack(max_steps_in_flight: int, checkpoint: Path | None) -> Iterator[Stack]:
    """Everything in one process."""
    arguments = ["-m", "coppice_bench.split.single", str(max_steps_in_flight)]
    with Process("engine", *arguments, *([str(checkpoint)] if checkpoint else [])) as driver:
        driver.hear()
        yield Stack(driver, None)


@contextmanager
def split_stack(max_context: int, checkpoint: Path | None) -> Iterator[Stack]:
    """Cache service, worker and scheduler as processes of their own, over Unix sockets as in `coppice up`."""
    grpc, admin_grpc, http, worker_grpc, metrics = free_addresses(5)
    key = {"COPPICE_SEAL_KEY": secrets.token_hex(32)}
    with ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory(prefix="coppice-split-"))
        sessions, steps = f"unix:{folder}/cache", f"unix:{folder}/worker"
        cache = ["-m", "coppice_cache", "--grpc-port", str(grpc.port), "--session-address", sessions]
        cache += ["--admin-grpc-port", str(admin_grpc.port), "--http-port", str(http.port)]
        running.enter_context(Process("cache", *cache, "--log-level", "error", environment=key))
        worker = None
        if checkpoint is None:
            worker = running.enter_context(Process("worker", "-m", "coppice_bench.split.worker", sessions, steps))
            worker.hear()
        else:
            arguments = ["-m", "coppice_worker", "--cache", sessions, "--model", str(checkpoint), "--threads", "1"]
            ports = ["--session-address", steps, "--grpc-port", str(worker_grpc.port)]
            ports += ["--http-port", str(metrics.port)]
            running.enter_context(Process("worker", *arguments, *ports, "--num-blocks", "4096", "--log-level", "error"))
        arguments = ["-m", "coppice_bench.split.scheduler", sessions, str(max_context)]
        driver = running.enter_context(Process("scheduler", *arguments))
        driver.hear()
        yield Stack(driver, worker)
