"""Attention over blocks on a CPU: the compiled kernel where few tokens see a context, torch where many do.

The kernels read blocks where they lie. A tile is some tokens of one row and all query heads of one KV head, so each
key is brought into the kernel's order once for all of them. There are two: one for any CPU, which leaves long chunks to
torch, and one for bfloat16 on a CPU with matrix tiles. Milliseconds for a layer of 8/2 heads of 64 on one core:

    new tokens of a row     16     32     64     64    256    256    512   2048
    context                300    300    300    512    256   1024    512   2048
    float32, torch        0.47   0.69   1.15   1.60   2.97    9.6    8.0     77
    float32, here         0.26   0.50   0.91   1.53   1.89   10.7    6.6     93
    bfloat16, torch       0.21   0.27   0.34   0.51   1.04    4.6    2.8     26
    bfloat16, here        0.13   0.25   0.48   0.83   1.07    7.2    4.1     56
    bfloat16, tiles       0.11   0.17   0.36   0.61   0.84    3.0    2.3     32

Torch's attention knows no soft cap and no sinks, and reads what is outside a window: layers with any of these are left
to the kernels whatever the length.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import numpy as np
import torch

from coppice_worker.core.batch.step_batch import Int32, Int64, StepBatch
from coppice_worker.kernels.backend import Angles, Heads, LayerAttention
from coppice_worker.kernels.native.arithmetic import NativeArithmetic
from coppice_worker.kernels.native.library import TILE_ROWS, LayerRecord, Library, StepRecord
from coppice_worker.kernels.pool import KvPool
from coppice_worker.kernels.torch_backend import PrefillRow, TorchBackend

_NO_WINDOW = 1 << 62  # keys
# The kernel without tiles takes rows with so many new tokens, and those whose context is so short.
_KERNEL_TOKENS_MAX = {torch.float32: 64, torch.bfloat16: 32}
_KERNEL_CONTEXT_MAX = {torch.float32: 768, torch.bfloat16: 0}


class NativeBackend(TorchBackend):
    """The one for CPUs with a C++ compiler, float32 or bfloat16."""

    def __init__(
        self, pool: KvPool, heads: Heads, library: Library, tile_attend: Callable[..., None] | None = None
    ) -> None:
        """`tile_attend` is attention by the CPU's tiles, which takes chunks of any length."""
        super().__init__(pool, heads)
        self.library = library
        self.attend = tile_attend or library.attend
        takes_all = tile_attend is not None or not all(map(_is_plain, heads.layers))
        self.kernel_tokens_max = sys.maxsize if takes_all else _KERNEL_TOKENS_MAX[pool.storage.dtype]
        self.kernel_context_max = _KERNEL_CONTEXT_MAX[pool.storage.dtype]
        self.arithmetic = NativeArithmetic(library)
        self.layers = (LayerRecord * len(heads.layers))(
            *(_record(pool, index, layer) for index, layer in enumerate(heads.layers))
        )

    def plan(self, batch: StepBatch) -> NativeStep:
        return NativeStep(self, batch)


def _is_plain(layer: LayerAttention) -> bool:
    return layer.window is None and layer.soft_cap is None and layer.sinks is None


def _record(pool: KvPool, index: int, layer: LayerAttention) -> LayerRecord:
    """Addresses of tensors that the backend's pool and heads keep."""
    norms = layer.head_norms
    weights = [layer.sinks] if norms is None else [layer.sinks, norms.query, norms.key]
    assert all(weight is None or (weight.dtype == torch.float32 and weight.is_contiguous()) for weight in weights)
    return LayerRecord(
        keys=pool.keys(index).data_ptr(),
        values=pool.values(index).data_ptr(),
        query_norm=None if norms is None else norms.query.data_ptr(),
        key_norm=None if norms is None else norms.key.data_ptr(),
        sinks=None if layer.sinks is None else layer.sinks.data_ptr(),
        window=_NO_WINDOW if layer.window is None else layer.window,
        norm_eps=0.0 if norms is None else norms.eps,
        scale=layer.scale,
        soft_cap=layer.soft_cap or 0.0,
    )


class NativeStep:
    """Index arrays of one step, shared by its layers; they live as long as the step."""

    def __init__(self, backend: NativeBackend, batch: StepBatch) -> None:
        self._backend = backend
        shape, num_heads = backend.pool.shape, backend.heads.num_heads
        group = num_heads // shape.num_kv_heads
        new_tokens = np.diff(batch.query_starts)
        is_long = (new_tokens > backend.kernel_tokens_max) & (batch.context_lens > backend.kernel_context_max)
        if group > TILE_ROWS:
            is_long[:] = True
        self._prefills = [PrefillRow(backend, batch, int(row)) for row in np.flatnonzero(is_long)]
        tile_tokens = max(1, TILE_ROWS // group)
        rows, starts = _tiles(np.flatnonzero(~is_long).astype(np.int32), new_tokens, tile_tokens)
        self._arrays: dict[str, Int32 | Int64] = {
            "slots": np.ascontiguousarray(batch.slots, np.int64),
            "tables": np.ascontiguousarray(batch.block_tables, np.int32),
            "context_lens": np.ascontiguousarray(batch.context_lens, np.int32),
            "query_starts": np.ascontiguousarray(batch.query_starts, np.int32),
            "tile_rows": rows,
            "tile_starts": starts,
        }
        self._record = StepRecord(
            layers=ctypes.addressof(backend.layers),
            **{name: array.ctypes.data for name, array in self._arrays.items()},
            num_tokens=len(batch.slots),
            num_tiles=len(rows),
            table_width=batch.block_tables.shape[1],
            num_heads=num_heads,
            num_kv_heads=shape.num_kv_heads,
            block_size=backend.pool.block_size,
            tile_tokens=tile_tokens,
            threads=torch.get_num_threads(),
        )
        self._address = ctypes.addressof(self._record)

    def write(self, layer: int, qkv: torch.Tensor, angles: Angles) -> torch.Tensor:
        assert qkv.stride()[1:] == (qkv.shape[2], 1)
        cos, sin = angles
        self._backend.library.write(self._address, layer, qkv.data_ptr(), qkv.stride(0), cos.data_ptr(), sin.data_ptr())
        return qkv[:, : self._backend.heads.num_heads]

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype)
        self._backend.attend(self._address, layer, query.data_ptr(), query.stride(0), out.data_ptr())
        for row in self._prefills:
            row.attend(layer, query, out)
        return out.view(query.shape[0], -1)


def _tiles(rows: Int32, new_tokens: Int32, tile_tokens: int) -> tuple[Int32, Int32]:
    """Each tile's row and its first token, counted from the row's first."""
    counts = -(-new_tokens[rows] // tile_tokens)
    tile_rows = np.repeat(rows, counts)
    index = np.arange(len(tile_rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return tile_rows.astype(np.int32), (index * tile_tokens).astype(np.int32)
