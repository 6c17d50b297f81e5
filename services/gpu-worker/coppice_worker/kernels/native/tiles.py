"""Projections by the CPU's bfloat16 tiles, with weights packed in the order in which they are read.

Measured beside oneDNN's packed ones, on two cores, for all projections of a model of 57M parameters, milliseconds:

    rows        1     32    2048
    oneDNN    7.9   13.0     170
    here      3.1    5.0     120

Weights lie in huge pages: reading them once in a step, page by page of 4 KiB, takes almost twice as long.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from ctypes import POINTER, c_int, c_int64, c_void_p

import torch

from .build import BuildError, build
from .library import open_library

_DEPTH = 32  # of a tile: how far a sum goes is a multiple of it
_HUGE_PAGE = 2 << 20  # bytes
_ARENA = 64 << 20  # bytes of memory that weights share


class ProductCall(ctypes.Structure):
    """`struct Product` of matmul.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("input", "weight", "bias", "out")),
        *((name, c_int64) for name in ("rows", "columns", "depth", "stride", "gated")),
    )


class Tiles:
    """Packs weights. Raises BuildError where there is no compiler, or the CPU has no such tiles."""

    def __init__(self) -> None:
        self._library = open_library(build("matmul.cpp"))
        self._library.packed_size.argtypes, self._library.packed_size.restype = [c_int64] * 3, c_int64
        self._library.pack.argtypes = [*[c_void_p] * 2, *[c_int64] * 3, c_int]
        self._library.product.argtypes = [POINTER(ProductCall), c_int]
        if not self._library.may_use_tiles():
            raise BuildError("the system does not let this process use the CPU's tiles")
        self._arena = torch.empty(0, dtype=torch.bfloat16)

    def takes(self, weight: torch.Tensor) -> bool:
        """Whether there are projections here for weight [out, in]."""
        return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.shape[1] % _DEPTH == 0

    def project(self, weight: torch.Tensor, bias: torch.Tensor | None) -> TileProjection:
        """Rows [T, in] -> [T, out], for weight [out, in] and bias [out]."""
        return self._pack(weight, bias, weight.shape[0], gated=False)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> TileProjection:
        """Rows [T, in] -> silu(gate) * up, [T, out], for gate above up in weight [2 out, in] and bias [2 out]."""
        return self._pack(weight, bias, weight.shape[0] // 2, gated=True)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None, columns: int, *, gated: bool) -> TileProjection:
        assert self.takes(weight)
        weight, depth = weight.contiguous(), weight.shape[1]
        packed = self._take(self._library.packed_size(columns, depth, gated))
        self._library.pack(weight.data_ptr(), packed.data_ptr(), columns, depth, gated, torch.get_num_threads())
        return TileProjection(self._library, packed, None if bias is None else bias.contiguous(), columns, depth, gated)

    def _take(self, size: int) -> torch.Tensor:
        """[size] elements, beginning with a line of the caches."""
        if len(self._arena) < size:
            self._arena = _huge_pages(max(_ARENA, size * self._arena.itemsize))
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
        gated: bool,
    ) -> None:
        self._product = library.product
        self._kept = packed, bias
        self._columns = columns
        self._depth = depth
        self._call = ProductCall(
            weight=packed.data_ptr(), bias=None if bias is None else bias.data_ptr(),
            columns=columns, depth=depth, gated=gated,
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


def _huge_pages(num_bytes: int) -> torch.Tensor:
    """Memory in huge pages as far as the system has them, which keep less to look up for each read."""
    size = -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + size].view(torch.bfloat16)
