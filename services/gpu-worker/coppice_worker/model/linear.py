"""Projections, in the memory layout and with the operand order that the CPU's matrix libraries are quick with.

A decode step on a CPU is bound by reading weights, and the libraries read them unevenly well for few rows. Measured
on one core with a 2816 x 512 weight, microseconds for 8 rows:

                            weight [out, in]    weight stored [in, out]    weight @ rows^T
    float32                 603                 282                        438
    bfloat16                201                 298                        131

So float32 projections are stored transposed, and narrow ones put the weight on the left. From 64 rows on, and on
other devices, it makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

_SWAP_ROWS = range(2, 64)
_SWAP_ROWS_FLOAT32 = range(8, 33)  # for a weight that cannot be stored transposed, as the embedding reads its rows


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection: weight [out, in] (in whichever memory order) and, in some families, a bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [T, in] -> [T, out], contiguous."""
        if not _swap(rows, self.weight):
            return linear(rows, self.weight, self.bias)
        out = torch.mm(self.weight, rows.t()).t().contiguous()
        return out if self.bias is None else out.add_(self.bias)


def lay_out(weight: torch.Tensor) -> torch.Tensor:
    """The weight [out, in] in the memory order that projections on its device are quickest with."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.t().contiguous().t()
    return weight


def _swap(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    if rows.device.type != "cpu":
        return False
    if rows.dtype == torch.bfloat16:
        return rows.shape[0] in _SWAP_ROWS
    return rows.dtype == torch.float32 and weight.is_contiguous() and rows.shape[0] in _SWAP_ROWS_FLOAT32
