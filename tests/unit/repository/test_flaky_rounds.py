"""`make flaky`, over suites of a few lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.wide  # busy neighbours, and none of the product
ROOT = Path(__file__).parents[3]
WAIT_S = 240.0  # the neighbours of these rounds keep the machine busy, too
LIGHT = [
    word for plugin in ("schemathesis", "langsmith_plugin", "xdist", "cacheprovider") for word in ("-p", f"no:{plugin}")
]


def start(folder: Path, suite: str, num_rounds: int) -> subprocess.Popen[str]:
    """In a session of its own, by which its processes are known."""
    (folder / "test_suite.py").write_text(suite)
    pytest = [sys.executable, "-m", "pytest", "-q", *LIGHT, "--rootdir", str(folder), str(folder)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.flaky", str(num_rounds), *pytest],
        cwd=ROOT,
        env={**os.environ, "ORDER_SEED": "7"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_of(session: int) -> list[str]:
    """Those that live."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = entry.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            found.append(entry.parent.name)
    return found


def test_what_failed_in_which_round_and_how_to_repeat_it(tmp_path: Path) -> None:
    suite = """
import os
def test_right(): pass
def test_by_chance(): assert os.environ["ORDER_SEED"] != "8"
"""
    rounds = start(tmp_path, suite, 2)
    printed, _ = rounds.communicate(timeout=WAIT_S)
    assert rounds.returncode == 1
    assert printed.endswith(
        "round 2: test_suite.py::test_by_chance\n"
        "    make flaky N=1 ORDER_SEED=8 ARGS=test_suite.py\n"
        "2 rounds, 1 failures\n"
    )


def test_fresh_memory_is_full_of_nonsense_in_what_a_test_starts_too(tmp_path: Path) -> None:
    suite = """
import subprocess, sys
def test_memory():
    code = "import torch; assert torch.empty(9).isnan().all() and torch.empty(9, dtype=torch.int64).min() > 1 << 60"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
    rounds = start(tmp_path, suite, 1)
    printed, _ = rounds.communicate(timeout=WAIT_S)
    assert (rounds.returncode, printed.splitlines()[-1]) == (0, "1 rounds, 0 failures")


def test_tests_that_cannot_run_are_a_failure(tmp_path: Path) -> None:
    rounds = start(tmp_path, "def test_(", 1)
    printed, _ = rounds.communicate(timeout=WAIT_S)
    assert rounds.returncode == 1
    assert printed.endswith("1 rounds, 1 failures\n")


def test_ctrl_c_ends_the_tests_what_they_started_and_the_neighbour(tmp_path: Path) -> None:
    suite = """
import pathlib, subprocess
def test_long():
    process = subprocess.Popen(["sleep", "600"])
    pathlib.Path(__file__).with_name("started").touch()
    process.wait()
"""
    rounds = start(tmp_path, suite, 5)
    wait_for((tmp_path / "started").exists, "the test to begin", WAIT_S)
    assert len(processes_of(rounds.pid)) == 4  # the rounds, pytest, what it started, and the neighbour
    os.kill(rounds.pid, signal.SIGINT)
    printed, _ = rounds.communicate(timeout=WAIT_S)
    assert rounds.returncode == 130
    assert printed.endswith("0 rounds, 0 failures\n")
    assert processes_of(rounds.pid) == []
