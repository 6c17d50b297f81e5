"""Kernels in Triton's interpreter: those around attention in a file of their own, to run beside
`test_interpreted_attention.py`, of which `make test` runs a part."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import ATTENTION, CHECKS, run_checks

pytestmark = pytest.mark.wide
EXECUTORS = {"check_executor.py"}


def test_kernels_in_the_interpreter() -> None:
    run_checks({path.name for path in CHECKS.glob("check_*.py")} - ATTENTION - EXECUTORS)


def test_executors_in_the_interpreter() -> None:
    run_checks(EXECUTORS)
