"""Runs the tests again and again, to find those that fail by chance: `make flaky N=10`.

    python -m tests.flaky ROUNDS COMMAND...

Each round has an order of its own (`ORDER_SEED`, or the given one and those after it), fresh memory that is full of
nonsense, here and in every process that tests start, and a neighbour that keeps one core busy. Exit codes: 0 nothing
failed, 1 something did, 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.conftest import ORDER_SEED

POISON = Path(__file__).parent / "poison"
NEIGHBOUR = [sys.executable, "-c", "while True: pass"]
STOP_S = 60.0


def environment(seed: int) -> dict[str, str]:
    paths = [str(POISON), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Of glibc: memory from malloc is filled with 0xfe, and with 0x01 when it is given back.
    return {**os.environ, ORDER_SEED: str(seed), "PYTHONPATH": os.pathsep.join(paths), "MALLOC_PERTURB_": "1"}


def failures_in(report: Path) -> list[str]:
    """Node ids of the tests that failed, of a report in JUnit's format."""
    cases = ElementTree.parse(report).iter("testcase")
    return [f"{case.get('file')}::{case.get('name')}" for case in cases if case.find("failure") is not None
            or case.find("error") is not None]  # fmt: skip


def run_round(command: Sequence[str], seed: int) -> list[str]:
    """What failed. Raises KeyboardInterrupt when nothing of the round runs any more."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        told = [*command, f"--junitxml={report}", "-o", "junit_family=xunit1"]
        neighbour = subprocess.Popen(NEIGHBOUR, process_group=0)
        # A group of its own: a Ctrl-C reaches it once, through us.
        tests = subprocess.Popen(told, env=environment(seed), process_group=0)
        try:
            code = tests.wait()
        except KeyboardInterrupt:
            os.killpg(tests.pid, signal.SIGINT)
            tests.wait(STOP_S)
            raise
        finally:
            if tests.poll() is None:
                os.killpg(tests.pid, signal.SIGKILL)
            neighbour.kill()
            neighbour.wait()
        failed = failures_in(report) if report.exists() else []
        return failed if failed or code == 0 else [f"exit code {code}"]


def replay_of(test: str, seed: int) -> str:
    """The file as a whole: what fails may depend on the tests before it."""
    file = test.partition("::")[0]
    return f"make flaky N=1 {ORDER_SEED}={seed}" + (f" ARGS={shlex.quote(file)}" if "::" in test else "")


def main(arguments: Sequence[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell in the background ignores the first
        signal.signal(number, signal.default_int_handler)
    num_rounds, command = int(arguments[0]), arguments[1:]
    first = int(os.environ.get(ORDER_SEED) or random.SystemRandom().randrange(10**6))
    found: list[str] = []
    num_done, code = 0, 0
    try:
        for index in range(num_rounds):
            print(f"--- round {index + 1} of {num_rounds}, {ORDER_SEED}={first + index}", flush=True)
            for test in run_round(command, first + index):
                found.append(f"round {index + 1}: {test}\n    {replay_of(test, first + index)}")
                code = 1
            num_done += 1
    except KeyboardInterrupt:
        code = 130
    print(*found, f"{num_done} rounds, {len(found)} failures", sep="\n", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
