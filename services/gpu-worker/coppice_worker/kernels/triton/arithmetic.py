"""What a layer does between its projections, each in one pass over memory and in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coppice_worker.core.batch.step_batch import SampleRows
from coppice_worker.kernels.backend import Activation
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.overlap import begin, overlapping
from coppice_worker.kernels.triton.sampling import choose

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)


@triton.jit
def add_norm_kernel(
    hidden_ptr,  # [T, SIZE] contiguous; becomes the sum
    delta_ptr,  # like `hidden`, or None
    weight_ptr,  # [SIZE] float32
    out_ptr,  # like `hidden`
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # power of two >= SIZE
):
    """One program per row, which it holds in registers."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, PADDED)
    inside = column < SIZE
    begin()
    row = tl.load(hidden_ptr + first + column, mask=inside, other=0.0)
    if delta_ptr is not None:
        delta = tl.load(delta_ptr + first + column, mask=inside, other=0.0)
        # What is normalised is the sum as it is stored, rounded to the model's type.
        row = (row.to(tl.float32) + delta.to(tl.float32)).to(row.dtype)
        tl.store(hidden_ptr + first + column, row, mask=inside)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    tl.store(out_ptr + first + column, (wide * scale * weight).to(row.dtype), mask=inside)


@triton.jit
def gated(gate, up, IS_SILU: tl.constexpr):
    """activation(gate) * up, in float32; GELU is by tanh."""
    # x * sigmoid(x); with tanh, x / 2 * (1 + tanh(y)) = x * sigmoid(2 y).
    inner = gate if IS_SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-inner)) * up


@triton.jit
def gate_kernel(
    both_ptr,  # [T, 2 * SIZE] contiguous: gate, then up
    out_ptr,  # [T, SIZE]
    SIZE: tl.constexpr,
    IS_SILU: tl.constexpr,  # else GELU by tanh
    TILE: tl.constexpr,
):
    """One program per (row, tile of it)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE
    gate = tl.load(both_ptr + row * (2 * SIZE) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * (2 * SIZE) + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    out = gated(gate, up, IS_SILU)
    tl.store(out_ptr + row * SIZE + column, out.to(out_ptr.dtype.element_ty), mask=inside)


class TritonArithmetic:
    """`Arithmetic` by Triton kernels."""

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        assert hidden.is_contiguous()
        assert delta is None or (delta.is_contiguous() and delta.dtype == hidden.dtype)
        assert weight.dtype == torch.float32
        out = torch.empty_like(hidden)
        rows, size = hidden.shape
        padded, options = launch.row_tile(size)
        add_norm_kernel[(rows,)](
            hidden, delta, weight, out, eps, SIZE=size, PADDED=padded, **options, **overlapping(rows)
        )
        return out

    def gate(self, both: torch.Tensor, activation: Activation) -> torch.Tensor:
        assert both.is_contiguous()
        rows, size = both.shape[0], both.shape[1] // 2
        out = both.new_empty((rows, size))
        gate_kernel[(rows, triton.cdiv(size, launch.GATE_TILE))](
            both, out, SIZE=size, IS_SILU=activation == "silu", TILE=launch.GATE_TILE, **launch.COMMON_OPTIONS
        )
        return out

    def choose(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        return choose(logits, rows)
