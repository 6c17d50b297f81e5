"""Projections of few rows, against float64."""

from __future__ import annotations

import pytest
import torch

from coppice_worker.kernels.backend import Activation
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.arithmetic import TritonArithmetic
from coppice_worker.kernels.triton.few_rows import FewRows, FewRowsProjection

ACTIVATIONS: list[Activation | None] = [None, "silu", "gelu_tanh"]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def projection(weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None) -> FewRowsProjection:
    makes = FewRows(weight.dtype, TritonArithmetic())
    assert makes.takes(weight)
    return makes.project(weight, bias) if activation is None else makes.gated(weight, bias, activation)


def wanted(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None
) -> torch.Tensor:
    out = rows.double() @ weight.double().t()
    if bias is not None:
        out += bias.double()
    if activation is None:
        return out
    gate, up = out.chunk(2, dim=-1)
    inner = gate if activation == "silu" else 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * up * torch.sigmoid(inner)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("num_rows", [1, 2, launch.FEW_ROWS, launch.FEW_ROWS + 1])
@pytest.mark.parametrize(
    ("columns", "depth", "has_bias"), [(66, 136, True), (3, 256, False), (5, 2056, True), (2, 4096, True)]
)
def test_projections(
    columns: int,
    depth: int,
    has_bias: bool,
    num_rows: int,
    activation: Activation | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Columns and depths that fill their tiles, and such that do not."""
    monkeypatch.setattr(launch, "FEW_ROWS_COLUMNS", 16)
    outs = columns * (1 if activation is None else 2)
    weight, rows, bias = random(outs, depth) * depth**-0.5, random(num_rows, depth), random(outs) if has_bias else None
    out = projection(weight, bias, activation)(rows)
    torch.testing.assert_close(out.double(), wanted(rows, weight, bias, activation), atol=1e-5, rtol=1e-5)


def test_rows_that_lie_apart() -> None:
    rows, weight = random(3, 2 * 64)[:, ::2], random(8, 64)
    out = projection(weight, None, None)(rows)
    torch.testing.assert_close(out.double(), wanted(rows, weight, None, None), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weight", [random(8, 12), random(16, 8).t(), random(8, 16).half()])
def test_what_is_left_to_torch(weight: torch.Tensor) -> None:
    assert not FewRows(torch.float32, TritonArithmetic()).takes(weight)
