"""Norms and gates between projections, against float64."""

from __future__ import annotations

import pytest
import torch

from coppice_worker.kernels.backend import Activation
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.arithmetic import TritonArithmetic


@pytest.mark.parametrize("size", [7, 64, 896])
@pytest.mark.parametrize("adds", [False, True])
def test_add_norm(size: int, adds: bool) -> None:
    torch.manual_seed(size)
    hidden, delta, weight = torch.randn(3, size) * 30, torch.randn(3, size), torch.randn(size)
    hidden[1] = delta[1] = 0.0
    total = hidden + delta if adds else hidden.clone()
    wide = total.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    found = TritonArithmetic().add_norm(hidden, delta if adds else None, weight, 1e-6)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(hidden, total)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate(activation: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GATE_TILE", 64)
    both = torch.randn(3, 2 * 100, generator=torch.Generator().manual_seed(0)) * 2
    gate, up = both.double().chunk(2, dim=-1)
    inner = gate if activation == "silu" else 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    found = TritonArithmetic().gate(both, activation)
    torch.testing.assert_close(found.double(), gate * up * torch.sigmoid(inner), atol=1e-5, rtol=1e-5)
