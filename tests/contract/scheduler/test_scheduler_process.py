"""The scheduler as a process: what it refuses before it listens."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.fakes.api.rest import DEMO

START_S = 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0", "--model", str(DEMO)], "--host 0.0.0.0 can be reached from other machines"),
        (
            [
                "--metrics-host",
                "0.0.0.0",
                "--metrics-port",
                "0",
                "--port",
                "0",
                "--grpc-port",
                "0",
                "--model",
                str(DEMO),
            ],
            "--metrics-host 0.0.0.0 can be reached from other machines",
        ),
        (["--model", str(DEMO / "nothing")], "is no directory"),
        (["--modell", "x"], "unknown flag --modell (did you mean --model?)"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "coppice_scheduler", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert ended.returncode == 2, ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("python -m coppice_scheduler: ")
    assert words in ended.stderr
