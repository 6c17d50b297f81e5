"""Projections by kernels of ours, with weights packed in the order in which they are read.

bfloat16 is for CPUs with tiles for it, for Intel's, for those where oneDNN has nothing for it, and for whoever asks for
it; float32 is for any.
Milliseconds for all projections of a model of 41M, weights from memory, on two cores of an Intel Xeon with tiles,
beside oneDNN's packed ones in bfloat16 and torch's of transposed weights in float32. "No tiles" is a run of its own, in
which oneDNN does without them, too. (benchmarks/results/kernels-cpu-2026-11-29.json, first and third line)

    rows                                  1      8     32    512
    bfloat16                  oneDNN    7.8    7.9     12     31
                              here      3.7    4.3    5.4     33
    bfloat16, no tiles        oneDNN    5.8    9.5     24    260
                              here      4.9    5.4     17    173
    float32                   torch     6.7     13     23    172
                              here      6.4    7.3     14    186

Of other machines, earlier, and in no file. The last two are without AVX-512: torch's are not packed there, and slow in
bfloat16.

    rows                                  1      8     16     32     64    512   2048
    bfloat16, 57M, two cores    oneDNN  7.9                 13.0                  170
                                here    3.1                  5.0                  120
    float32, 40M, one core      torch  12.3   25.6   32.3   32.2   53.5    338
                                here   11.2   12.8   12.7   21.9   49.6    394
    bfloat16, 40M, one core     torch   9.8     68            266          2585  10047
                                here    5.2     13             35           301   1173
    float32, 40M, one core      torch  15.7     32             63           306   1157
                                here   11.7     12             31           299   1177

Weights lie in huge pages: reading them once in a step, page by page of 4 KiB, takes almost twice as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import torch

from coppice_worker.kernels.backend import Activation
from coppice_worker.kernels.host_memory import zeros_in_huge_pages
from coppice_worker.kernels.native.build import build, cpu_vendor
from coppice_worker.kernels.native.library import ACTIVATIONS, TILE_DEPTH, function, open_library, tile_library

_ARENA = 64 << 20  # bytes of memory that weights share
PACKED_DTYPES = (torch.float32, torch.bfloat16)


class ProductRecord(ctypes.Structure):
    """`struct Product` of product.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("input", "weight", "bias", "out")),
        *((name, c_int64) for name in ("rows", "columns", "depth", "stride", "activation")),
    )


class Packer:
    """Packs weights of one type, for the CPU's bfloat16 tiles or for any CPU. Raises BuildError where there is no
    compiler, or there are no tiles."""

    def __init__(self, dtype: torch.dtype, *, tiles: bool = False) -> None:
        """`dtype` is one of PACKED_DTYPES."""
        self.dtype, self.tiles = dtype, tiles
        if tiles:
            assert dtype == torch.bfloat16
            library = tile_library("tile_matmul.cpp")
        else:
            library = open_library(build("matmul.cpp", ("BFLOAT16",) if dtype == torch.bfloat16 else ()))
        self._depth_unit = TILE_DEPTH if tiles else 1
        library.packed_size.argtypes, library.packed_size.restype = [c_int64] * 3, c_int64
        self._packed_size = library.packed_size
        self._write = function(library, "pack", *[c_void_p] * 2, *[c_int64] * 4)
        self._product = function(library, "product", c_void_p, c_int64)
        self._arena = torch.empty(0, dtype=dtype)

    def takes(self, weight: torch.Tensor) -> bool:
        """Whether there are projections here for weight [out, in]."""
        is_ours = weight.device.type == "cpu" and weight.dtype == self.dtype
        return is_ours and weight.shape[1] % self._depth_unit == 0

    def project(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedProjection:
        """Rows [T, in] -> [T, out], for weight [out, in] and bias [out]."""
        return self._pack(weight, bias, weight.shape[0], activation=0)

    def gated(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> PackedProjection:
        """Rows [T, in] -> activation(gate) * up, [T, out], for gate above up in weight [2 out, in] and bias [2 out]."""
        return self._pack(weight, bias, weight.shape[0] // 2, activation=ACTIVATIONS[activation])

    def _pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, columns: int, *, activation: int
    ) -> PackedProjection:
        assert self.takes(weight)
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        depth, gated = weight.shape[1], activation != 0
        packed = self._take(self._packed_size(columns, depth, gated))
        self._write(weight.data_ptr(), packed.data_ptr(), columns, depth, gated, torch.get_num_threads())
        record = ProductRecord(
            weight=packed.data_ptr(), bias=None if bias is None else bias.data_ptr(),
            columns=columns, depth=depth, activation=activation,
        )  # fmt: skip
        return PackedProjection(self._product, record, (packed, bias))

    def _take(self, size: int) -> torch.Tensor:
        """[size] elements, beginning with a line of the caches."""
        if len(self._arena) < size:
            self._arena = zeros_in_huge_pages(max(_ARENA, size * self._arena.itemsize)).view(self.dtype)
        taken, self._arena = self._arena[:size], self._arena[size:]
        return taken


def leaves_bfloat16_to_onednn() -> bool:
    """Whether oneDNN multiplies bfloat16 where there are no tiles and nobody asks for kernels of ours. On Intel's CPUs
    ours are quicker, whose two units for float32 do as much as what multiplies pairs of bfloat16; on others nobody has
    compared."""
    return onednn_packs_bfloat16() and cpu_vendor() != "GenuineIntel"


def onednn_packs_bfloat16() -> bool:
    """Whether torch's oneDNN keeps bfloat16 weights in an order of its own here, which takes AVX-512. Without it torch
    multiplies them at a tenth of float32's rate.

    These operations are not part of torch's interface: where one is missing, nothing is packed.
    """
    needed = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not all(hasattr(torch.ops.mkldnn, name) for name in needed):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedProjection:
    """One packed weight."""

    def __init__(
        self,
        product: Callable[..., None],
        record: ProductRecord,
        kept: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        """`kept` are the tensors whose addresses the record has."""
        self._product = product
        self._record = record
        self._address = ctypes.addressof(record)
        self._kept = kept

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]; rows may be strided."""
        record = self._record
        num_rows, depth = rows.shape
        assert depth == record.depth
        assert rows.stride(1) == 1
        out = rows.new_empty((num_rows, record.columns))
        record.input, record.out = rows.data_ptr(), out.data_ptr()
        record.rows, record.stride = num_rows, rows.stride(0)
        self._product(self._address, torch.get_num_threads())
        return out
