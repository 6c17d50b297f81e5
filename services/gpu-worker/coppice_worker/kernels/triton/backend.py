"""Launches the kernels for one step: which rows decode, which extend, and how the context is split.

Index arrays go to the device once per step and serve every layer; the host knows all lengths before the step, so
nothing is read back.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton

from coppice_worker.core.batch import Int32, Int64, StepBatch
from coppice_worker.kernels.backend import Arithmetic
from coppice_worker.kernels.pool import KvPool
from coppice_worker.kernels.torch_arithmetic import TorchArithmetic
from coppice_worker.kernels.torch_backend import refuse_overlap

from . import launch
from .blocks import copy_blocks_kernel, write_kv_kernel, zero_blocks_kernel
from .decode import decode_kernel, reduce_kernel
from .extend import extend_kernel

_CPU_SMS = 1  # the interpreter runs one program after another


class TritonBackend:
    """Paged attention on CUDA (or in Triton's interpreter)."""

    def __init__(self, pool: KvPool) -> None:
        self.pool = pool
        self.arithmetic: Arithmetic = TorchArithmetic()
        self.device = pool.storage.device
        properties = torch.cuda.get_device_properties(self.device) if self.device.type == "cuda" else None
        self.num_sms = properties.multi_processor_count if properties else _CPU_SMS

    def plan(self, batch: StepBatch, num_heads: int) -> TritonStep:
        return TritonStep(self, batch, num_heads)

    def zero_blocks(self, block_ids: Int32) -> None:
        planes = self.pool.planes()
        num_planes, num_blocks, width = planes.shape
        grid = (block_ids.size, triton.cdiv(width, launch.COPY_TILE), num_planes)
        zero_blocks_kernel[grid](
            planes, self.to_device(block_ids), num_blocks, width, TILE=launch.COPY_TILE, **launch.COMMON_OPTIONS
        )

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        refuse_overlap(src, dst)
        planes = self.pool.planes()
        num_planes, num_blocks, width = planes.shape
        grid = (src.size, triton.cdiv(width, launch.COPY_TILE), num_planes)
        copy_blocks_kernel[grid](
            planes,
            self.to_device(src),
            self.to_device(dst),
            num_blocks,
            width,
            TILE=launch.COPY_TILE,
            **launch.COMMON_OPTIONS,
        )

    def to_device(self, array: Int32 | Int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


class TritonStep:
    """One step's launches; index arrays go to the device once and serve every layer."""

    def __init__(self, backend: TritonBackend, batch: StepBatch, num_heads: int) -> None:
        self._backend = backend
        shape = backend.pool.shape
        self._group = num_heads // shape.num_kv_heads
        self._num_heads = num_heads
        self._scale_log2 = math.log2(math.e) / math.sqrt(shape.head_dim)
        self._constants = {
            "NUM_KV_HEADS": shape.num_kv_heads,
            "GROUP": self._group,
            "HEAD_DIM": shape.head_dim,
            "HEAD_PADDED": max(16, triton.next_power_of_2(shape.head_dim)),
            "BLOCK_SIZE": backend.pool.block_size,
        }
        new_tokens = np.diff(batch.query_starts)
        decodes = np.flatnonzero(new_tokens == 1).astype(np.int32)
        extends = np.flatnonzero(new_tokens > 1).astype(np.int32)
        self._slots = backend.to_device(batch.slots)
        self._tables = backend.to_device(batch.block_tables)
        self._context_lens = backend.to_device(batch.context_lens)
        self._query_starts = backend.to_device(batch.query_starts)
        self._decode_rows = backend.to_device(decodes)
        self._decode_tokens = backend.to_device(batch.query_starts[decodes])
        self._plan_splits(batch.context_lens[decodes])
        tile_rows, tile_starts = launch.extend_tiles(extends, new_tokens[extends] * self._group)
        self._tile_rows, self._tile_starts = backend.to_device(tile_rows), backend.to_device(tile_starts)

    def _plan_splits(self, context_lens: Int32) -> None:
        pool, device = self._backend.pool, self._backend.device
        count = context_lens.size
        longest = int(context_lens.max(initial=1))
        self._split_tokens = launch.split_tokens(context_lens, pool.shape.num_kv_heads, self._backend.num_sms)
        self._num_splits = triton.cdiv(longest, self._split_tokens)
        partials = (count, self._num_heads, self._num_splits, pool.shape.head_dim)
        self._partial = torch.empty(partials, dtype=torch.float32, device=device)
        self._lse = torch.empty(partials[:3], dtype=torch.float32, device=device)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self._backend.pool.keys(layer), self._backend.pool.values(layer)
        self._write(key, value, keys, values)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self._decode_rows.numel():
            self._decode(query, keys, values, out)
        if self._tile_rows.numel():
            self._extend(query, keys, values, out)
        return out.view(query.shape[0], -1)

    def _write(self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        tokens, heads, head_dim = key.shape
        write_kv_kernel[(tokens,)](
            key, value, self._slots, keys, values, key.stride(0), value.stride(0),
            NUM_KV_HEADS=heads, HEAD_DIM=head_dim, BLOCK_SIZE=self._backend.pool.block_size,
            WIDTH=triton.next_power_of_2(heads * head_dim), **launch.COMMON_OPTIONS,
        )  # fmt: skip

    def _decode(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        count = self._decode_rows.numel()
        decode_kernel[(count, keys.shape[1], self._num_splits)](
            query, keys, values, self._tables, self._context_lens, self._decode_rows, self._decode_tokens,
            self._partial, self._lse, query.stride(0), self._tables.stride(0), self._num_splits, self._split_tokens,
            self._scale_log2, **self._constants,
            GROUP_PADDED=max(16, triton.next_power_of_2(self._group)), TILE=launch.DECODE_TILE, **launch.DECODE_OPTIONS,
        )  # fmt: skip
        reduce_kernel[(count, self._num_heads)](
            self._partial, self._lse, self._decode_tokens, out, self._num_heads, self._num_splits,
            HEAD_DIM=self._constants["HEAD_DIM"], HEAD_PADDED=self._constants["HEAD_PADDED"],
            SPLITS=launch.REDUCE_SPLITS,
            **launch.COMMON_OPTIONS,
        )  # fmt: skip

    def _extend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        extend_kernel[(self._tile_rows.numel(), keys.shape[1])](
            query, keys, values, self._tables, self._context_lens, self._query_starts,
            self._tile_rows, self._tile_starts, out, query.stride(0), self._tables.stride(0), self._scale_log2,
            **self._constants, ROWS=launch.EXTEND_ROWS, TILE=launch.EXTEND_TILE,
            **launch.extend_options(self._constants["HEAD_PADDED"]),
        )  # fmt: skip
