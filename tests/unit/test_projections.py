"""Every kind of projection, and the norm, compute what their definitions say in float64."""

from __future__ import annotations

import pytest
import torch

from coppice_worker.kernels.torch_arithmetic import normalise
from coppice_worker.model.linear import Linear, PackedLinear, project, tied

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 33, 300])
def test_projections(dtype: torch.dtype, has_bias: bool, num_rows: int) -> None:
    weight = random(96, 48, dtype=dtype) / 7
    bias = random(96, dtype=dtype, seed=1) if has_bias else None
    wide = random(num_rows, 64, dtype=dtype, seed=2)
    for rows in (wide[:, :48], wide[:, :48].contiguous()):
        expected = rows.double() @ weight.double().T
        expected = expected if bias is None else expected + bias.double()
        found = project(weight, bias)(rows)
        assert found.dtype == dtype
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype])
        if bias is None:
            torch.testing.assert_close(tied(weight)(rows).double(), expected, atol=TOLERANCE[dtype] * 4, rtol=0.02)


def test_which_kind_is_taken() -> None:
    narrow = PackedLinear if torch.ops.mkldnn._is_mkldnn_bf16_supported() else Linear
    assert isinstance(project(random(8, 8, dtype=torch.bfloat16)), narrow)
    wide = project(random(8, 4, dtype=torch.float32))
    assert isinstance(wide, Linear)
    assert wide.weight.stride() == (1, 8)
    embedding = random(8, 4, dtype=torch.float32)
    shared = tied(embedding)
    assert isinstance(shared, Linear)
    assert shared.weight is embedding


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norm(dtype: torch.dtype) -> None:
    hidden, weight = random(9, 64, dtype=dtype) * 30, random(64, dtype=dtype, seed=1)
    hidden[3] = 0
    exact = hidden.double()
    expected = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    found = normalise(hidden, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
