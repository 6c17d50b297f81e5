"""How the threads of a worker's kernels wait is said before torch reads it, unless the operator said it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = "import coppice_worker, os; print(os.environ.get('GOMP_SPINCOUNT'))"
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("said", "found"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_the_operator_is_right(said: dict[str, str], found: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment | said, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == found
