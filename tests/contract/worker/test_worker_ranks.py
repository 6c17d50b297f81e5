"""A worker whose model is shared out lives and dies as a whole, and says which rank it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.checkpoints import write_tiny_checkpoint
from tests.fakes.waiting import WAIT_S, wait_for

START_S = 60.0


class RankedWorker:
    """`python -m coppice_worker --tensor-parallel 2` without a cache service; ready when it listens."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        self._log = log
        ports = [f"--{name}-port=0" for name in ("session", "grpc", "http")]
        model = [f"--model={checkpoint}", "--num-blocks=8", "--tensor-parallel=2", "--cache=127.0.0.1:1"]
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "coppice_worker", *model, *ports], stdout=sink, stderr=sink
            )
        wait_for(lambda: " listens on " in self.log() or self.process.poll() is not None, "the worker", START_S)
        assert self.process.poll() is None, self.log()
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        (self.rank,) = map(int, children.split())

    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def rank_is_gone(self) -> bool:
        try:
            os.kill(self.rank, 0)
        except ProcessLookupError:
            return True
        # Whoever adopts orphans may be slow to bury them.
        return ") Z" in Path(f"/proc/{self.rank}/stat").read_text()


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RankedWorker]:
    worker = RankedWorker(write_tiny_checkpoint(tmp_path / "model"), tmp_path / "log")
    yield worker
    worker.kill()


def test_a_rank_that_is_killed_ends_the_worker(worker: RankedWorker) -> None:
    os.kill(worker.rank, signal.SIGKILL)
    assert worker.process.wait(WAIT_S) == 1
    assert f"rank 1 (process {worker.rank}) ended: killed by SIGKILL" in worker.log()
    assert "Traceback" not in worker.log()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("end", "code"),
    [
        (_kill, -9),
        pytest.param(_interrupt, 0, marks=pytest.mark.long),
        pytest.param(_terminate, 0, marks=pytest.mark.long),
    ],
)
def test_ranks_end_with_their_worker(
    worker: RankedWorker, end: Callable[[subprocess.Popen[bytes]], None], code: int
) -> None:
    end(worker.process)
    assert worker.process.wait(WAIT_S) == code
    wait_for(worker.rank_is_gone, "the end of rank 1")
    assert "Traceback" not in worker.log()
