"""`make test-long`, with a Python that tells what it is asked for, and fails where a test of that half would."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WIDE, LONG = "not long and not containers", "long and not containers"
PYTHON = """#!/bin/sh
while [ "$1" != -m ] || [ "$2" = pytest ]; do shift; done
echo "$2" >> "$ASKED"
case "$FAILS" in *"($2)"*) exit 1 ;; esac
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed here")
@pytest.mark.parametrize("fails", [(), (WIDE,), (LONG,), (WIDE, LONG)], ids=["neither", "wide", "long", "both"])
def test_both_halves_of_the_long_tests_run_whatever_fails(fails: tuple[str, ...], tmp_path: Path) -> None:
    python, asked = tmp_path / "bin/python", tmp_path / "asked"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    told = {"ASKED": str(asked), "FAILS": "".join(f"({half})" for half in fails)}
    # Those of a make that runs these tests are its own.
    outer = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    ended = subprocess.run(
        ["make", "test-long", f"VENV={tmp_path}", "SET_UP=@true"],
        cwd=ROOT,
        env={**outer, **told},
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.read_text().splitlines() == [WIDE, LONG], ended.stderr
    assert (ended.returncode != 0) is bool(fails)
