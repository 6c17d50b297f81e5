"""Attention over blocks with plain torch operations: exact everywhere, and quick on a CPU.

Row gather. The blocks of a layer are rows of a matrix [num_blocks * HK, block * D]; one `index_select` into a
buffer that lives as long as the backend brings a group's context together as [B, HK, tokens, D]:

    table of a row   | 7 | 2 | 9 | 9 |      padded with the row's own last block, masked, so that nobody
    tokens           |kkkk|kkkk|k...|....|  reads another sequence's block, not even multiplied by zero

Decodes are grouped by length and their G query heads per KV head are the query rows of one attention call.
Prefill rows go one by one, in slices of queries; each slice sees keys only up to its own last token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from coppice_worker.core.batch import Int32, Int64, StepBatch

from .backend import Angles, Arithmetic, AttentionStep, Heads
from .pool import KvPool
from .torch_arithmetic import TorchArithmetic, norm_heads, rotate

_QUERY_SLICE = 256  # queries per attention call of a prefill row; bounds the mask to this many rows
_GROUP_WASTE_MAX = 0.25  # share of padding blocks that a group of decodes may gather
_GROUP_TOKENS_MAX = 1 << 14  # context tokens gathered at a time; bounds the buffers, and a longer row goes alone


class TorchBackend:
    """Works on any device; the one for CPUs."""

    def __init__(self, pool: KvPool, heads: Heads) -> None:
        self._pool = pool
        self.heads = heads
        self.arithmetic: Arithmetic = TorchArithmetic()
        self._buffers: list[torch.Tensor] = [pool.storage.new_empty(0), pool.storage.new_empty(0)]
        self._causal = pool.storage.new_empty((_QUERY_SLICE, 0))

    def plan(self, batch: StepBatch) -> AttentionStep:
        return TorchStep(self, batch)

    def zero_blocks(self, block_ids: Int32) -> None:
        for plane in self._pool.planes():
            plane.index_fill_(1, self.to_device(block_ids), 0)

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        refuse_overlap(src, dst)
        for plane in self._pool.planes():
            plane.index_copy_(1, self.to_device(dst), plane.index_select(1, self.to_device(src)))

    def gather_blocks(self, block_ids: Int32, staging: torch.Tensor) -> None:
        for plane, staged in zip(self._pool.planes(), self._pool.staged(staging), strict=True):
            staged.copy_(plane.index_select(1, self.to_device(block_ids)))

    def scatter_blocks(self, staging: torch.Tensor, block_ids: Int32) -> None:
        for plane, staged in zip(self._pool.planes(), self._pool.staged(staging), strict=True):
            plane.index_copy_(1, self.to_device(block_ids), staged)

    @property
    def pool(self) -> KvPool:
        return self._pool

    def to_device(self, array: Int32 | Int64) -> torch.Tensor:
        """As an int64 tensor on the pool's device."""
        return torch.from_numpy(array.astype(np.int64)).to(self._pool.storage.device)

    def gather(self, layer: int, rows: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of block rows [N], each [N, block * D], in buffers that the next gather overwrites.

        `tail` names token rows of the result that hold no token of the sequence: they are zeroed, as an
        earlier occupant's NaN or infinity would get through a mask.
        """
        pool = self._pool
        width = pool.block_size * pool.shape.head_dim
        wanted = rows.numel() * width
        results = []
        for plane, blocks in enumerate((pool.keys(layer), pool.values(layer))):
            if self._buffers[plane].numel() < wanted:
                self._buffers[plane] = blocks.new_empty(wanted + wanted // 2)
            out = self._buffers[plane][:wanted].view(-1, width)
            torch.index_select(blocks.view(-1, width), 0, rows, out=out)
            out.view(-1, pool.shape.head_dim).index_fill_(0, tail, 0)
            results.append(out)
        return results[0], results[1]

    def causal_mask(self, num_queries: int, num_keys: int) -> torch.Tensor:
        """Additive [num_queries, num_keys]: the last query sees all keys, each one before it one key less."""
        columns = self._causal.shape[1]
        if columns < num_keys:
            columns = max(num_keys, 2 * columns, 1024)
            mask = self._causal.new_zeros((_QUERY_SLICE, columns))
            hidden = torch.ones((_QUERY_SLICE, _QUERY_SLICE), dtype=torch.bool, device=mask.device).triu_(1)
            mask[:, columns - _QUERY_SLICE :].masked_fill_(hidden, float("-inf"))
            self._causal = mask
        return self._causal[_QUERY_SLICE - num_queries :, columns - num_keys :]


def refuse_overlap(src: Int32, dst: Int32) -> None:
    """Copies run in no order, so a block that is read and written in one call has no defined result."""
    if np.intersect1d(src, dst).size or np.unique(dst).size != dst.size:
        raise ValueError("copy_blocks: a destination is also a source or named twice; split the copies into two calls")


class TorchStep:
    """Index arithmetic of one step, shared by its layers."""

    def __init__(self, backend: TorchBackend, batch: StepBatch) -> None:
        self._backend = backend
        pool = backend.pool
        self._token_rows = backend.to_device(_token_rows(batch.slots, pool))
        new_tokens = np.diff(batch.query_starts)
        decodes = np.flatnonzero(new_tokens == 1)
        contexts = [_Context(backend, batch, rows) for rows in _group_by_length(batch, decodes, pool.block_size)]
        self._parts: list[Callable[[int, torch.Tensor, torch.Tensor], None]] = [
            _DecodeGroup(backend, batch, context).attend for context in contexts
        ]
        self._parts += [PrefillRow(backend, batch, int(row)).attend for row in np.flatnonzero(new_tokens > 1)]

    def write(self, layer: int, qkv: torch.Tensor, angles: Angles) -> torch.Tensor:
        pool, heads = self._backend.pool, self._backend.heads
        head_dim, num_rotated = pool.shape.head_dim, heads.num_heads + pool.shape.num_kv_heads
        norms = heads.layers[layer].head_norms
        if norms is not None:
            norm_heads(qkv[:, :num_rotated], heads.num_heads, norms)
        rotated = rotate(qkv[:, :num_rotated], angles)
        key, value = rotated[:, heads.num_heads :], qkv[:, num_rotated:]
        pool.keys(layer).view(-1, head_dim).index_copy_(0, self._token_rows, key.reshape(-1, head_dim))
        pool.values(layer).view(-1, head_dim).index_copy_(0, self._token_rows, value.reshape(-1, head_dim))
        return rotated[:, : heads.num_heads]

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for attend in self._parts:
            attend(layer, query, out)
        return out.view(query.shape[0], -1)


class _Context:
    """Where the context of some sequence rows lies: rows [B], `num_blocks` blocks each after padding."""

    def __init__(self, backend: TorchBackend, batch: StepBatch, rows: Int64) -> None:
        pool = backend.pool
        block_size, num_kv_heads = pool.block_size, pool.shape.num_kv_heads
        self.rows = rows
        self.lens: Int64 = batch.context_lens[rows].astype(np.int64)
        blocks = -(-self.lens // block_size)
        self.num_blocks = int(blocks.max())
        self.num_tokens = self.num_blocks * block_size
        columns = np.minimum(np.arange(self.num_blocks), blocks[:, None] - 1)
        table = np.take_along_axis(batch.block_tables[rows].astype(np.int64), columns, axis=1)
        heads = np.arange(num_kv_heads)[None, :, None]
        self._block_rows = backend.to_device((table[:, None, :] * num_kv_heads + heads).reshape(-1))
        self._shape = (len(rows), num_kv_heads, self.num_tokens, pool.shape.head_dim)
        hidden = np.arange(self.num_tokens) >= self.lens[:, None]  # [B, tokens]
        every_head = np.broadcast_to(hidden[:, None, :], self._shape[:3])
        self._tail = backend.to_device(np.flatnonzero(every_head))
        self.mask = pool.storage.new_zeros((len(rows), 1, 1, self.num_tokens))
        self.mask.view(len(rows), -1).masked_fill_(torch.from_numpy(hidden).to(self.mask.device), float("-inf"))
        self._backend = backend

    def gather(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [B, HK, tokens, D]; valid until the next gather."""
        keys, values = self._backend.gather(layer, self._block_rows, self._tail)
        return keys.view(self._shape), values.view(self._shape)


class _DecodeGroup:
    """Rows with one new token each and contexts of similar length."""

    def __init__(self, backend: TorchBackend, batch: StepBatch, context: _Context) -> None:
        self._backend = backend
        self._context = context
        self._tokens = backend.to_device(batch.query_starts[context.rows])
        shape = backend.pool.shape
        group = backend.heads.num_heads // shape.num_kv_heads
        self._packed = (len(context.rows), shape.num_kv_heads, group, shape.head_dim)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        keys, values = self._context.gather(layer)
        packed = query.index_select(0, self._tokens).view(self._packed)
        scale = self._backend.heads.layers[layer].scale
        attended = scaled_dot_product_attention(packed, keys, values, attn_mask=self._context.mask, scale=scale)
        out.index_copy_(0, self._tokens, attended.reshape(len(self._tokens), *query.shape[1:]))


class PrefillRow:
    """One row with several new tokens, after whatever context it already has."""

    def __init__(self, backend: TorchBackend, batch: StepBatch, row: int) -> None:
        self._backend = backend
        self._context = _Context(backend, batch, np.array([row]))
        self._start, self._end = int(batch.query_starts[row]), int(batch.query_starts[row + 1])

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        keys, values = self._context.gather(layer)
        context_len = int(self._context.lens[0])
        for start in range(self._start, self._end, _QUERY_SLICE):
            end = min(start + _QUERY_SLICE, self._end)
            num_keys = context_len - (self._end - end)
            attended = scaled_dot_product_attention(
                query[start:end].transpose(0, 1).unsqueeze(0),
                keys[:, :, :num_keys],
                values[:, :, :num_keys],
                attn_mask=self._backend.causal_mask(end - start, num_keys),
                scale=self._backend.heads.layers[layer].scale,
                enable_gqa=True,
            )
            out[start:end] = attended[0].transpose(0, 1)


def _token_rows(slots: Int64, pool: KvPool) -> Int64:
    """[T * HK] rows of the pool seen as [num_blocks * HK * block, D] that take the new tokens' heads."""
    blocks, offsets = np.divmod(slots, pool.block_size)
    heads = np.arange(pool.shape.num_kv_heads)
    rows: Int64 = (blocks[:, None] * pool.shape.num_kv_heads + heads) * pool.block_size + offsets[:, None]
    return rows.reshape(-1)


def _group_by_length(batch: StepBatch, rows: Int64, block_size: int) -> list[Int64]:
    """Cuts decode rows, longest first, into groups that gather little padding and fit the buffers."""
    blocks = -(-batch.context_lens[rows] // block_size)
    order = np.argsort(-blocks, kind="stable")
    groups: list[Int64] = []
    start = 0
    while start < len(order):
        longest = int(blocks[order[start]])
        fits = max(1, _GROUP_TOKENS_MAX // (longest * block_size))
        candidates = blocks[order[start : start + fits]]
        waste = 1 - np.cumsum(candidates) / (longest * np.arange(1, len(candidates) + 1))
        count = int(np.searchsorted(waste, _GROUP_WASTE_MAX, side="right"))
        groups.append(rows[order[start : start + count]])
        start += count
    return groups
