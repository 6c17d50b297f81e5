"""How a program of ours ends: exit codes, one line for a person, and where a library ended it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from coppice.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE


def ended(main: str) -> subprocess.CompletedProcess[str]:
    """A program whose `main` is this."""
    script = f"import os, sys\nfrom coppice.errors import *\ndef main():\n    {main}\nsys.exit(run_main('prog', main))"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("main", "code", "line"),
    [
        ("return EXIT_OK", EXIT_OK, ""),
        ("raise CoppiceError('it broke', hint='mend it')", EXIT_FAILURE, "prog: it broke (mend it)\n"),
        ("raise UsageError('a flag\\n is wrong')", EXIT_USAGE, "prog: a flag is wrong\n"),
        ("raise KeyboardInterrupt", EXIT_INTERRUPTED, ""),
    ],
)
def test_an_error_of_ours_is_one_line(main: str, code: int, line: str) -> None:
    end = ended(main)
    assert (end.returncode, end.stderr) == (code, line)


def test_a_bug_of_ours_keeps_its_traceback() -> None:
    end = ended("raise KeyError('nobody')")
    assert end.returncode == EXIT_FAILURE
    assert "in main" in end.stderr


def test_what_a_library_ends_says_where() -> None:
    end = ended("os.abort()")
    assert end.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in end.stderr
    assert "in main" in end.stderr
