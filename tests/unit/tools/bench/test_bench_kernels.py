"""`coppice bench kernels`: a small run measures what the worker serves with, and says how close it is to others."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from coppice.errors import EXIT_OK
from coppice_bench.kernels.attention import ragged
from coppice_bench.kernels.clocks import HostClock
from coppice_bench.kernels.gpu_projections import ROWS, SHAPES, Shape, few_rows_case, few_rows_cases
from coppice_cli.app import app

pytestmark = pytest.mark.wide
PROJECTIONS = ["projections"] if shutil.which(os.environ.get("CXX", "g++")) else []  # kernels that are compiled here


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = CliRunner().invoke(app, ["bench", "kernels", "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == EXIT_OK
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_says_what_it_ran_on_and_the_ceilings(report: dict[str, Any]) -> None:
    assert {"date", "machine", "versions", "load_average", "device", "threads"} <= report.keys()
    assert report["copy_gb_per_s"] > 0
    assert all(rate > 0 for rate in report["matmul_tflop_per_s"].values())


def test_every_kernel_has_a_time_a_fraction_and_others(report: dict[str, Any]) -> None:
    names = report["kernels"].keys()
    for part in (
        "decode", "prefill", "rotate, write", "copy", "zero", "add, norm", "silu", "greedy", "top-k", *PROJECTIONS,
    ):  # fmt: skip
        assert any(name.startswith(part) for name in names), part
    for name, found in report["kernels"].items():
        assert found["time_us"] > 0, name
        assert found["fraction"] > 0, name
        assert all(ratio > 0 for ratio in found["vs"].values()), name


@pytest.mark.parametrize("part", ["decode", "prefill", *PROJECTIONS])
def test_what_is_measured_is_right(report: dict[str, Any], part: str) -> None:
    found = {name: kernel for name, kernel in report["kernels"].items() if name.startswith(part)}
    compared = {name: max(kernel["error"].values()) for name, kernel in found.items() if "error" in kernel}
    assert len(compared) >= 2
    for name, error in compared.items():
        assert error < (1e-5 if "float32" in name else 2e-2), name


def test_ragged_lengths_have_the_sum() -> None:
    lens = ragged(64 * 4096, 128, 32768)
    assert (min(lens), max(lens)) == (128, 32768)
    assert abs(sum(lens) / (64 * 4096) - 1) < 0.2


@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_move_weights_rows_and_results_once(shape: Shape) -> None:
    pytest.importorskip("triton")
    case = few_rows_case(torch.device("meta"), torch.bfloat16, shape, 8)
    halves = 2 if shape.is_gated else 1
    assert case.work == 2 * (halves * shape.columns * shape.depth + 8 * (shape.depth + shape.columns))
    assert case.comparable == {"linear"}
    if not shape.is_gated:
        out = case.peers["linear"]()
        assert isinstance(out, torch.Tensor)
        assert out.shape == (8, shape.columns)


def test_few_rows_are_of_gpus() -> None:
    assert few_rows_cases(torch.device("cpu"), (torch.bfloat16,), quick=False) == []
    assert len(few_rows_cases(torch.device("cuda"), (torch.bfloat16,), quick=False)) == len(SHAPES) * len(ROWS)


def test_short_kernels_are_repeated_while_there_is_time() -> None:
    calls = {"short": 0, "other": 0}

    def called(name: str) -> None:
        calls[name] += 1

    HostClock(4, budget_s=600).times_us({name: partial(called, name) for name in calls})
    assert calls["short"] == calls["other"] > 100
