"""What is seen while a model loads."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from coppice_worker.edge import loading
from coppice_worker.edge.load_report import LINE_EVERY_S, LoadReport
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.model.loader import LoadProgress
from tests.fakes.checkpoints import write_tiny_checkpoint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def load(stream: io.StringIO, clock: Clock, step_s: float) -> None:
    report = LoadReport(stream, clock)
    for done in range(1, 11):
        clock.now_s += step_s
        report(LoadProgress(done * 800_000_000, 8_000_000_000))


def test_a_terminal_shows_a_bar_that_goes_away(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "coppice.worker")
    terminal = Terminal()
    load(terminal, Clock(), 0.1)
    bars = terminal.getvalue().split("\r\x1b[K")
    assert bars[0] == bars[-1] == ""
    assert [bar.count("█") for bar in bars[1:-1]] == list(range(4, 40, 4))
    assert "50% of 8.00 B parameters" in bars[5]
    assert caplog.messages == ["loaded 8.00 B parameters in 1.0 s"]


def test_a_log_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "coppice.worker")
    log = io.StringIO()
    load(log, Clock(), LINE_EVERY_S / 4)
    assert log.getvalue() == ""
    assert caplog.messages == [
        "loading: 40 % of 8.00 B parameters",
        "loading: 80 % of 8.00 B parameters",
        "loaded 8.00 B parameters in 5.0 s",
    ]


def test_a_small_model_is_counted_in_millions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "coppice.worker")
    LoadReport(io.StringIO(), Clock())(LoadProgress(1_250_000, 1_250_000))
    assert caplog.messages == ["loaded 1.2 M parameters in 0.0 s"]


def test_a_worker_says_what_it_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "coppice.worker")
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    loading.load(loading.resolve_settings(WorkerSettings(model=str(folder), num_blocks=4, device="cpu")))
    assert any(message.startswith("loaded 0.1 M parameters") for message in caplog.messages)
