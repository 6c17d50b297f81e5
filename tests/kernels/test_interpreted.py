"""Kernels in Triton's interpreter: those around attention in a file of their own, to run beside
`test_interpreted_attention.py`; whole executors only in the wide set."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import ATTENTION, CHECKS, run_checks

EXECUTORS = {"check_executor.py"}


def test_kernels_in_the_interpreter() -> None:
    run_checks({path.name for path in CHECKS.glob("check_*.py")} - ATTENTION - EXECUTORS)


@pytest.mark.wide
def test_executors_in_the_interpreter() -> None:
    run_checks(EXECUTORS)
