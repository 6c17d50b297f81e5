"""Every kind of projection, and the norm, compute what their definitions say in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from coppice_worker.kernels.torch_arithmetic import normalise
from coppice_worker.model.decoder.linear import Linear, PackedLinear, Projections

PROJECTIONS = Projections()  # without kernels of ours
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
        found = PROJECTIONS.project(weight, bias)(rows)
        assert found.dtype == dtype
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype])
        if bias is None:
            torch.testing.assert_close(
                PROJECTIONS.tied(weight)(rows).double(), expected, atol=TOLERANCE[dtype] * 4, rtol=0.02
            )


def test_which_kind_is_taken() -> None:
    narrow = PackedLinear if torch.ops.mkldnn._is_mkldnn_bf16_supported() else Linear
    assert isinstance(PROJECTIONS.project(random(8, 8, dtype=torch.bfloat16)), narrow)
    wide = PROJECTIONS.project(random(8, 4, dtype=torch.float32))
    assert isinstance(wide, Linear)
    assert wide.weight.stride() == (1, 8)
    embedding = random(8, 4, dtype=torch.float32)
    shared = PROJECTIONS.tied(embedding)
    assert isinstance(shared, Linear)
    assert shared.weight is embedding


def test_gate_and_up() -> None:
    weight, bias, rows = (random(*shape, dtype=torch.float32) for shape in ((96, 48), (96,), (9, 48)))
    gate, up = torch.nn.functional.linear(rows, weight, bias).chunk(2, dim=-1)
    found = PROJECTIONS.gated(weight, bias, "silu")(rows)
    torch.testing.assert_close(found, torch.nn.functional.silu(gate) * up, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("missing", ["_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported"])
def test_operations_that_torch_no_longer_has_are_done_without(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    names = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    left = {name: lambda *_: True for name in names if name != missing}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**left))
    weight, rows = random(96, 48, dtype=torch.bfloat16) / 7, random(5, 48, dtype=torch.bfloat16, seed=2)
    projection = PROJECTIONS.project(weight)
    assert isinstance(projection, Linear)
    torch.testing.assert_close(projection(rows).double(), rows.double() @ weight.double().T, atol=0.08, rtol=0.02)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norm(dtype: torch.dtype) -> None:
    hidden, weight = random(9, 64, dtype=dtype) * 30, random(64, dtype=dtype, seed=1)
    hidden[3] = 0
    exact = hidden.double()
    expected = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    found = normalise(hidden, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
