"""Attention in Triton's interpreter: how rows are split is checked in the wide set."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import ATTENTION, run_checks

pytestmark = pytest.mark.wide

SHORT = {"check_attention.py"}


def test_attention_in_the_interpreter() -> None:
    run_checks(SHORT)


def test_decode_and_extend_in_the_interpreter() -> None:
    run_checks(ATTENTION - SHORT)
