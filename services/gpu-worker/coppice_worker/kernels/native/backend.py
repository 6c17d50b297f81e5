"""Attention over blocks on a CPU: the compiled kernel where few tokens see a context, torch where many do.

The kernel reads blocks where they lie. A tile is some tokens of one row and all query heads of one KV head, so each
key is widened to float32 once for all of them. Long chunks go to torch, whose matrix products use the CPU's tiles.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from coppice_worker.core.batch import Int32, Int64, StepBatch
from coppice_worker.kernels.pool import KvPool
from coppice_worker.kernels.torch_backend import PrefillRow, TorchBackend

from .arithmetic import NativeArithmetic
from .library import TILE_ROWS, AttentionCall, Library

_KERNEL_TOKENS_MAX = 32  # new tokens of a row, for the kernel


class NativeBackend(TorchBackend):
    """The one for CPUs with a C++ compiler, float32 or bfloat16."""

    def __init__(self, pool: KvPool, library: Library) -> None:
        super().__init__(pool)
        self.library = library
        self.arithmetic = NativeArithmetic(library)

    def plan(self, batch: StepBatch, num_heads: int) -> NativeStep:
        return NativeStep(self, batch, num_heads)


class NativeStep:
    """Index arrays of one step, shared by its layers; they live as long as the step."""

    def __init__(self, backend: NativeBackend, batch: StepBatch, num_heads: int) -> None:
        self._backend = backend
        shape = backend.pool.shape
        group = num_heads // shape.num_kv_heads
        new_tokens = np.diff(batch.query_starts)
        is_long = new_tokens > _KERNEL_TOKENS_MAX
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
        self._call = AttentionCall(
            **{name: array.ctypes.data for name, array in self._arrays.items()},
            num_tokens=len(batch.slots),
            num_tiles=len(rows),
            table_width=batch.block_tables.shape[1],
            num_heads=num_heads,
            num_kv_heads=shape.num_kv_heads,
            block_size=backend.pool.block_size,
            tile_tokens=tile_tokens,
        )

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        call, pool = self._call, self._backend.pool
        out = torch.empty(query.shape, dtype=query.dtype)
        call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.query_stride, call.key_stride, call.value_stride = query.stride(0), key.stride(0), value.stride(0)
        call.out = out.data_ptr()
        call.key_pool, call.value_pool = pool.keys(layer).data_ptr(), pool.values(layer).data_ptr()
        self._backend.library.attend(ctypes.byref(call), torch.get_num_threads())
        for row in self._prefills:
            row.attend(layer, query, out)
        return out.view(query.shape[0], -1)


def _tiles(rows: Int32, new_tokens: Int32, tile_tokens: int) -> tuple[Int32, Int32]:
    """Each tile's row and its first token, counted from the row's first."""
    counts = -(-new_tokens[rows] // tile_tokens)
    tile_rows = np.repeat(rows, counts)
    index = np.arange(len(tile_rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return tile_rows.astype(np.int32), (index * tile_tokens).astype(np.int32)
