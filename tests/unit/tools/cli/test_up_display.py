"""What `coppice up` shows of a child that takes its time."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from coppice_up.display import LiveDisplay, PlainDisplay
from coppice_up.host import ChildSpec
from coppice_up.local_host import LocalHost
from coppice_up.supervisor import Supervisor

LINE = "2026-01-31T12:00:00.123Z INFO coppice.worker: loading: 40 % of 8.00 B parameters"


class Rows(PlainDisplay):
    """Keeps what it is told of children that start."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO()))
        self.last_lines: list[str] = []

    def starting(self, name: str, last_line: str) -> None:
        self.last_lines.append(last_line)


def test_the_last_message_stands_beside_a_child_that_starts() -> None:
    screen = io.StringIO()
    display = LiveDisplay(Console(file=screen, force_terminal=True, width=100))
    display.begin(["worker-0"])
    display.starting("worker-0", LINE)
    display.close()
    assert "starting  loading: 40 % of 8.00 B parameters" in screen.getvalue()
    assert "coppice.worker" not in screen.getvalue()


def test_a_child_does_not_get_the_certificate_of_who_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COPPICE_TLS_CERT", "operator.pem")
    monkeypatch.setenv("COPPICE_SCHEDULER_SSL_CERTFILE", "public.pem")
    monkeypatch.setenv("COPPICE_LOG_LEVEL", "debug")
    script = (
        "import os, json; print(json.dumps([name for name in os.environ if name.startswith('COPPICE_')]), flush=True)"
    )
    log = tmp_path / "log"
    spec = ChildSpec("cache", (sys.executable, "-c", f"{script}; import time; time.sleep(60)"), log.read_text, log)
    supervisor = Supervisor([[spec]], LocalHost(), Rows())
    try:
        assert supervisor.start()
        assert "COPPICE_LOG_LEVEL" in log.read_text()
        assert not {"COPPICE_TLS_CERT", "COPPICE_SCHEDULER_SSL_CERTFILE"} & set(json.loads(log.read_text()))
    finally:
        supervisor.stop()


def test_a_log_is_followed_until_its_child_is_ready(tmp_path: Path) -> None:
    ready, display = tmp_path / "ready", Rows()
    script = f"import time; print('first'); print({LINE!r}); time.sleep(60)"
    deadline_s = time.monotonic() + 60

    def look() -> bool:
        assert time.monotonic() < deadline_s
        if LINE in display.last_lines:
            ready.touch()
        return ready.exists()

    spec = ChildSpec("worker-0", (sys.executable, "-c", script), look, tmp_path / "log")
    supervisor = Supervisor([[spec]], LocalHost(), display)
    try:
        assert supervisor.start()
        assert display.last_lines[0] == ""
        assert display.last_lines[-1] == LINE
        told = len(display.last_lines)
        with spec.log_path.open("a") as log:
            log.write("something else\n")
        supervisor.tick()
        assert len(display.last_lines) == told
    finally:
        supervisor.stop()
