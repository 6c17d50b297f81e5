"""Two stacks that start at the same moment, over stand-ins for the services: both want the usual ports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.e2e.up.test_up_supervision import RunningUp
from tests.fakes.waiting import WAIT_S, wait_for


def begin(folder: Path, socket_dir: Path) -> RunningUp:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    output = folder / "output"
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.tools.up_driver", "0", str(folder), "usual"],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(socket_dir)},
        )
    return RunningUp(process, output, folder)


def internal_ports(up: RunningUp) -> set[int]:
    commands = " ".join(up.children().values())
    return {int(port) for port in re.findall(r"-port (\d+)", commands)}


def test_two_stacks_at_once_do_not_fight_over_the_usual_ports(tmp_path: Path, socket_dir: Path) -> None:
    with ExitStack() as ends:
        both = [begin(tmp_path / name, socket_dir) for name in ("first", "second")]
        for up in both:
            ends.callback(up.process.wait, WAIT_S)
            ends.callback(up.process.kill)
        for up in both:
            up.wait_for("development setup")
        first, second = map(internal_ports, both)
        assert first
        assert second
        assert not first & second
        assert any("taken by others  70" in up.output() for up in both), "one of them has the others"
        assert not any(" died" in up.output() for up in both)
        for up in both:
            assert up.stop(signal.SIGINT) == 0
    wait_for(lambda: not any(up.children() for up in both), "children gone after the test")
