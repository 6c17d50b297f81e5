"""What a layer does between its projections, by torch; on any device."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, rms_norm, silu

from coppice_worker.core.batch.step_batch import SampleRows
from coppice_worker.kernels.backend import Activation, Angles, HeadNorms
from coppice_worker.kernels.pool import FLOAT8_MAX, SCALE_MIN
from coppice_worker.kernels.torch_sampling import choose


class TorchArithmetic:
    """`Arithmetic` by torch operations."""

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if delta is not None:
            hidden += delta
        return normalise(hidden, weight, eps)

    def gate(self, both: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")).mul_(up)

    def choose(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        return choose(logits, rows)


def norm_heads(heads: torch.Tensor, num_heads: int, norms: HeadNorms) -> None:
    """Norms heads [T, H + HK, D] in place: H query heads, then the key heads."""
    for part, weight in ((heads[:, :num_heads], norms.query), (heads[:, num_heads:], norms.key)):
        part.copy_(normalise(part, weight, norms.eps))


def rotate(heads: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotated heads [T, N, D], contiguous, by angles [T, 1, D / 2]."""
    cos, sin = angles
    first, second = heads.chunk(2, dim=-1)
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


def to_float8(heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads [..., D] as float8_e4m3fn, and their scales [...] float32: each head's largest becomes the type's."""
    wide = heads.float()
    scales = (wide.abs().amax(dim=-1) / FLOAT8_MAX).clamp_(min=SCALE_MIN)
    return (wide * scales.reciprocal().unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def normalise(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of the last dimension of hidden [..., N] by weight [N] float32; the result is rounded once.

    On a CPU torch's own one converts narrow rows to float32 in several passes over memory; the scale is all that
    needs it.
    """
    if hidden.dtype == torch.float32:
        return rms_norm(hidden, weight.shape, weight, eps)
    norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(hidden, scale).mul_(weight).to(hidden.dtype)
