"""Attention in Triton's interpreter."""

from __future__ import annotations

from tests.kernels.interpreter import ATTENTION, run_checks


def test_attention_in_the_interpreter() -> None:
    run_checks(ATTENTION)
