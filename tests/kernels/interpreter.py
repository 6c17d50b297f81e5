"""Runs interpreted kernel checks in a process of their own, whatever this process has imported before."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

CHECKS = Path(__file__).parent / "interpreted"
ATTENTION = {"check_attention.py", "check_chunks.py", "check_decode.py", "check_extend.py"}  # half of the time
ROOT = Path(__file__).parents[2]


def run_checks(names: Iterable[str]) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed on this platform")
    files = [str(CHECKS / name) for name in sorted(names)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "python_files=check_*.py", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
