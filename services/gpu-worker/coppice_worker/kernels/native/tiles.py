"""Projections by the CPU's bfloat16 tiles, with weights packed in the order in which they are read.

Measured beside oneDNN's packed ones, on two cores, for all projections of a model of 57M parameters, milliseconds:

    rows        1     32    2048
    oneDNN    7.9   13.0     170
    here      3.1    5.0     120

Weights lie in huge pages: reading them once in a step, page by page of 4 KiB, takes almost twice as long.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_int64, c_void_p

import torch

from coppice_worker.kernels.backend import Activation
from coppice_worker.kernels.host_memory import zeros_in_huge_pages

from .build import build
from .library import ACTIVATIONS, TILE_DEPTH, allow_tiles, open_library

_ARENA = 64 << 20  # bytes of memory that weights share


class ProductCall(ctypes.Structure):
    """`struct Product` of matmul.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("input", "weight", "bias", "out")),
        *((name, c_int64) for name in ("rows", "columns", "depth", "stride", "activation")),
    )


class Tiles:
    """Packs weights. Raises BuildError where there is no compiler, or the CPU has no such tiles."""

    def __init__(self) -> None:
        self._library = open_library(build("matmul.cpp"))
        self._library.packed_size.argtypes, self._library.packed_size.restype = [c_int64] * 3, c_int64
        self._library.pack.argtypes = [*[c_void_p] * 2, *[c_int64] * 3, c_int]
        self._library.product.argtypes = [POINTER(ProductCall), c_int]
        allow_tiles(self._library)
        self._arena = torch.empty(0, dtype=torch.bfloat16)

    def takes(self, weight: torch.Tensor) -> bool:
        """Whether there are projections here for weight [out, in]."""
        return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.shape[1] % TILE_DEPTH == 0

    def project(self, weight: torch.Tensor, bias: torch.Tensor | None) -> TileProjection:
        """Rows [T, in] -> [T, out], for weight [out, in] and bias [out]."""
        return self._pack(weight, bias, weight.shape[0], activation=0)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> TileProjection:
        """Rows [T, in] -> activation(gate) * up, [T, out], for gate above up in weight [2 out, in] and bias [2 out]."""
        return self._pack(weight, bias, weight.shape[0] // 2, activation=ACTIVATIONS[activation])

    def _pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, columns: int, *, activation: int
    ) -> TileProjection:
        assert self.takes(weight)
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        depth, gated = weight.shape[1], activation != 0
        packed = self._take(self._library.packed_size(columns, depth, gated))
        self._library.pack(weight.data_ptr(), packed.data_ptr(), columns, depth, gated, torch.get_num_threads())
        return TileProjection(self._library, packed, bias, columns, depth, activation)

    def _take(self, size: int) -> torch.Tensor:
        """[size] elements, beginning with a line of the caches."""
        if len(self._arena) < size:
            self._arena = zeros_in_huge_pages(max(_ARENA, size * self._arena.itemsize)).view(torch.bfloat16)
        taken, self._arena = self._arena[:size], self._arena[size:]
        return taken


class TileProjection:
    """One packed weight."""

    def __init__(
        self,
        library: ctypes.CDLL,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        columns: int,
        depth: int,
        activation: int,
    ) -> None:
        self._product = library.product
        self._kept = packed, bias
        self._columns = columns
        self._depth = depth
        self._call = ProductCall(
            weight=packed.data_ptr(), bias=None if bias is None else bias.data_ptr(),
            columns=columns, depth=depth, activation=activation,
        )  # fmt: skip

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]; rows may be strided."""
        assert rows.shape[1] == self._depth
        assert rows.stride(1) == 1
        out = rows.new_empty((rows.shape[0], self._columns))
        call = self._call
        call.input, call.out = rows.data_ptr(), out.data_ptr()
        call.rows, call.stride = rows.shape[0], rows.stride(0)
        self._product(ctypes.byref(call), torch.get_num_threads())
        return out
