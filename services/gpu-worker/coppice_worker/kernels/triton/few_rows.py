"""Projections of few rows, whose time is that of reading the weight; a GPU's library takes up to a third longer.

    one row      each program has a few rows of the weight and adds up products, lane by lane
    2 to 16      products of the matrix unit: 64 rows of the weight fill its long side, the rows its narrow one

A gated projection has gate and up side by side in a program, so that nothing is written in between. What has more
rows goes to torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from coppice_worker.kernels.backend import Activation, Arithmetic
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.arithmetic import gated
from coppice_worker.kernels.triton.overlap import let_next_begin, overlapping, wait_for_before

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)


@triton.jit
def _read(weight_ptr, columns, depths, DEPTH: tl.constexpr, TILE_DEPTH: tl.constexpr):
    """[COLUMNS, TILE_DEPTH]; `columns` are rows of the weight that there are."""
    at = weight_ptr + columns.to(tl.int64)[:, None] * DEPTH + depths[None, :]
    if DEPTH % TILE_DEPTH == 0:
        return tl.load(at)
    return tl.load(at, mask=depths[None, :] < DEPTH, other=0.0)


@triton.jit
def one_row_kernel(
    row_ptr,  # [DEPTH]
    weight_ptr,  # [num_columns, DEPTH]; [2 * num_columns, DEPTH] if GATED: gate, then up
    bias_ptr,  # [num_columns], likewise; None: none
    out_ptr,  # [num_columns]
    num_columns,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    IS_SILU: tl.constexpr,  # else GELU by tanh
    COLUMNS: tl.constexpr,  # of a program
    TILE_DEPTH: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    column = tl.minimum(column, num_columns - 1)
    let_next_begin()
    depths = tl.arange(0, TILE_DEPTH)
    weight = _read(weight_ptr, column, depths, DEPTH, TILE_DEPTH)
    up = _read(weight_ptr, num_columns + column, depths, DEPTH, TILE_DEPTH) if GATED else weight
    wait_for_before()  # with the first tile of the weight on its way: nobody writes that
    row = tl.load(row_ptr + depths, mask=depths < DEPTH, other=0.0).to(tl.float32)
    total = weight.to(tl.float32) * row[None, :]
    total_up = up.to(tl.float32) * row[None, :] if GATED else total
    for first in range(TILE_DEPTH, DEPTH, TILE_DEPTH):
        depths = first + tl.arange(0, TILE_DEPTH)
        weight = _read(weight_ptr, column, depths, DEPTH, TILE_DEPTH)
        row = tl.load(row_ptr + depths, mask=depths < DEPTH, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * row[None, :]
        if GATED:
            up = _read(weight_ptr, num_columns + column, depths, DEPTH, TILE_DEPTH)
            total_up += up.to(tl.float32) * row[None, :]
    out = tl.sum(total, axis=1)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + column).to(tl.float32)
    if GATED:
        out_up = tl.sum(total_up, axis=1)
        if bias_ptr is not None:
            out_up += tl.load(bias_ptr + num_columns + column).to(tl.float32)
        out = gated(out, out_up, IS_SILU)
    tl.store(out_ptr + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    rows_ptr,  # [num_rows, DEPTH] contiguous
    weight_ptr,  # [num_columns, DEPTH]; [2 * num_columns, DEPTH] if GATED: gate, then up
    bias_ptr,  # [num_columns], likewise; None: none
    out_ptr,  # [num_rows, num_columns]
    num_rows,
    num_columns,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    IS_SILU: tl.constexpr,  # else GELU by tanh
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a program
    TILE_DEPTH: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    inside = (column[:, None] < num_columns) & (row[None, :] < num_rows)
    column = tl.minimum(column, num_columns - 1)
    out = tl.zeros([COLUMNS, ROWS], tl.float32)
    out_up = tl.zeros([COLUMNS, ROWS], tl.float32)
    for first in range(0, DEPTH, TILE_DEPTH):
        depths = first + tl.arange(0, TILE_DEPTH)
        mask = (row[None, :] < num_rows) & (depths[:, None] < DEPTH)
        rows = tl.load(rows_ptr + row[None, :] * DEPTH + depths[:, None], mask=mask, other=0.0)
        weight = _read(weight_ptr, column, depths, DEPTH, TILE_DEPTH)
        out = tl.dot(weight, rows, out, input_precision="ieee")
        if GATED:
            up = _read(weight_ptr, num_columns + column, depths, DEPTH, TILE_DEPTH)
            out_up = tl.dot(up, rows, out_up, input_precision="ieee")
    if bias_ptr is not None:
        out += tl.load(bias_ptr + column).to(tl.float32)[:, None]
    if GATED:
        if bias_ptr is not None:
            out_up += tl.load(bias_ptr + num_columns + column).to(tl.float32)[:, None]
        out = gated(out, out_up, IS_SILU)
    at = out_ptr + row[None, :] * num_columns + column[:, None]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class FewRowsProjection:
    """Rows [T, in] -> [T, out]; a quicker way for those of few rows."""

    weight: torch.Tensor  # [out, in] contiguous; [2 out, in] where gated
    bias: torch.Tensor | None
    arithmetic: Arithmetic
    activation: Activation | None = None  # of a gated one

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if len(rows) > launch.FEW_ROWS:
            out = linear(rows, self.weight, self.bias)
            return out if self.activation is None else self.arithmetic.gate(out, self.activation)
        return project_few(rows.contiguous(), self.weight, self.bias, self.activation)


def project_few(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None
) -> torch.Tensor:
    """Rows [T, in] contiguous, T of FEW_ROWS at most."""
    is_gated = activation is not None
    (num_rows, depth), columns = rows.shape, len(weight) // (2 if is_gated else 1)
    out = rows.new_empty((num_rows, columns))
    shape = {"DEPTH": depth, "GATED": is_gated, "IS_SILU": activation == "silu"}
    if num_rows == 1:
        tile, tile_depth, options = launch.one_row_tile(depth, is_gated=is_gated)
        one_row_kernel[(triton.cdiv(columns, tile),)](
            rows, weight, bias, out, columns, **shape, COLUMNS=tile, TILE_DEPTH=tile_depth, **options, **overlapping(1)
        )
        return out
    tile, tile_depth, options = launch.few_rows_tile(columns, is_gated=is_gated)
    few_rows_kernel[(triton.cdiv(columns, tile),)](
        rows, weight, bias, out, num_rows, columns, **shape,
        ROWS=launch.FEW_ROWS, COLUMNS=tile, TILE_DEPTH=tile_depth, **options,
    )  # fmt: skip
    return out


class FewRows:
    """Makes such projections of weights on a GPU."""

    def __init__(self, dtype: torch.dtype, arithmetic: Arithmetic) -> None:
        self._dtype, self._arithmetic = dtype, arithmetic

    def takes(self, weight: torch.Tensor) -> bool:
        """Whether there are projections here for weight [out, in]: its rows are read 16 bytes at a time."""
        return weight.dtype == self._dtype and weight.is_contiguous() and weight.shape[1] % 8 == 0

    def project(self, weight: torch.Tensor, bias: torch.Tensor | None) -> FewRowsProjection:
        """Rows [T, in] -> [T, out], for weight [out, in] and bias [out]."""
        return FewRowsProjection(weight, bias, self._arithmetic)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> FewRowsProjection:
        """Rows [T, in] -> activation(gate) * up, [T, out], for gate above up in weight [2 out, in] and bias [2 out]."""
        return FewRowsProjection(weight, bias, self._arithmetic, activation)
