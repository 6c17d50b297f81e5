"""The kernels around attention, and whole executors, in Triton's interpreter. In a file of its own, to run beside
`test_interpreted_attention.py`."""

from __future__ import annotations

from tests.kernels.interpreter import ATTENTION, CHECKS, run_checks


def test_kernels_in_the_interpreter() -> None:
    run_checks({path.name for path in CHECKS.glob("check_*.py")} - ATTENTION)
