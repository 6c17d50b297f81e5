"""Projections, in the memory layout and with the operand order that the CPU's matrix libraries are quick with.

A decode step on a CPU is bound by reading weights, and the libraries read them unevenly well for few rows. Measured
on one core, microseconds:

                          weight 3072 x 512 by rows           weight 32000 x 512
                            1      8     32    256               8      32
    bfloat16  [out, in]    255    266    462    961            4212    5077
              weight @ x^T 258    228    314   1421            3414    4591
              packed       177    178    208    864            2409    3175

Packed is oneDNN's own blocked order, chosen once at load instead of in every call. So projections are packed: by
kernels of ours where there is a compiler (`kernels/native/packed.py`, which says on which CPUs bfloat16, too), else
bfloat16 by oneDNN, else not at all.
The one exception is a row by row look-up, which the embedding needs: a head that is tied to it is packed beside it.

float32 projections by torch are stored transposed, [in, out], which takes half the time at 8 rows; from 64 rows on, and
on other devices, it makes no difference.

On a GPU, few rows have kernels of ours (`kernels/triton/few_rows.py`), all others those of its library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from coppice_worker.kernels.backend import Activation, Projection, ProjectionKernels
from coppice_worker.kernels.native.packed import onednn_packs_bfloat16
from coppice_worker.kernels.torch_arithmetic import TorchArithmetic
from coppice_worker.model.decoder.ranks import RankGroup

_SWAP_ROWS_FLOAT32 = range(8, 33)  # for a weight that cannot be stored transposed, as the embedding reads its rows
_PACKED_FOR_ROWS = 32  # the blocked order hardly depends on it


@dataclass(frozen=True, slots=True)
class Projections:
    """Makes projections of weights, each of the quickest kind for its device.

    A weight is [out, in]; a bias, which some families have, is [out].
    """

    gate: Callable[[torch.Tensor, Activation], torch.Tensor] = TorchArithmetic().gate  # [T, 2 N] -> [T, N]
    kernels: ProjectionKernels | None = None
    group: RankGroup | None = None

    def project(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Projection:
        if self.kernels is not None and self.kernels.takes(weight):
            return self.kernels.project(weight, bias)
        if _packs(weight):
            return PackedLinear(weight, bias)
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            weight = weight.t().contiguous().t()
        return Linear(weight, bias)

    def tied(self, embedding: torch.Tensor) -> Projection:
        """The head that shares its weight with `embedding` [vocab, hidden], which stays as it is."""
        is_packed = embedding.dtype == torch.bfloat16 or (self.kernels is not None and self.kernels.takes(embedding))
        return self.project(embedding) if is_packed else Linear(embedding)

    def summed(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Projection:
        """One whose results are added up where several ranks hold columns of `weight` each."""
        share = self.project(weight, bias)
        return share if self.group is None else Summed(share, self.group)

    def gathered(self, weight: torch.Tensor, width: int) -> Projection:
        """One whose results are joined to `width` columns where several ranks hold rows of `weight` each."""
        share = self.project(weight)
        return share if self.group is None else Gathered(share, self.group, width)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> Projection:
        """Rows [T, in] -> activation(gate) * up, for a weight whose upper half is gate and whose lower half is up."""
        if self.kernels is not None and self.kernels.takes(weight):
            return self.kernels.gated(weight, bias, activation)
        return Gated(self.project(weight, bias), self.gate, activation)


@dataclass(frozen=True, slots=True)
class Summed:
    """A projection of which each rank computes a share of the sum."""

    share: Projection
    group: RankGroup

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.group.add_up(self.share(rows))


@dataclass(frozen=True, slots=True)
class Gathered:
    """A projection of which each rank computes equally many columns; those from `width` on are padding."""

    share: Projection
    group: RankGroup
    width: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.group.join_columns(self.share(rows))[:, : self.width].contiguous()


def _packs(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and onednn_packs_bfloat16()


@dataclass(frozen=True, slots=True)
class Gated:
    """Gate and up by one projection, then the gate."""

    both: Projection
    gate: Callable[[torch.Tensor, Activation], torch.Tensor]
    activation: Activation

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.gate(self.both(rows), self.activation)


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection by torch; the weight [out, in] lies in whichever memory order."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if not self._swaps(rows):
            return linear(rows, self.weight, self.bias)
        out = torch.mm(self.weight, rows.t()).t().contiguous()
        return out if self.bias is None else out.add_(self.bias)

    def _swaps(self, rows: torch.Tensor) -> bool:
        if rows.device.type != "cpu" or rows.dtype != torch.float32:
            return False
        return self.weight.is_contiguous() and rows.shape[0] in _SWAP_ROWS_FLOAT32


class PackedLinear:
    """A projection by oneDNN, which keeps its weight in an order of its own."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out
