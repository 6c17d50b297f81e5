"""Attention over blocks with plain torch operations: exact everywhere, and quick on a CPU.

Row gather. The blocks of a layer are rows of a matrix [num_blocks * HK, block * D]; one `index_select` into a
buffer that lives as long as the backend brings a group's context together as [B, HK, tokens, D]:

    table of a row   | 7 | 2 | 9 | 9 |      padded with the row's own last block, masked, so that nobody
    tokens           |kkkk|kkkk|k...|....|  reads another sequence's block, not even multiplied by zero

Decodes are grouped by length and their G query heads per KV head are the query rows of one attention call.
Prefill rows go one by one, in slices of queries; each slice sees keys only up to its own last token.

Layers with a window gather only the blocks that it reaches into:

    window of 6      |....|..kk|kkkk|k...|    what it does not show is zeroed and masked
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from coppice_worker.core.batch.step_batch import Int32, Int64, StepBatch
from coppice_worker.kernels.backend import Angles, Arithmetic, AttentionStep, Heads
from coppice_worker.kernels.pool import KvPool
from coppice_worker.kernels.torch_arithmetic import TorchArithmetic, norm_heads, rotate, to_float8
from coppice_worker.kernels.torch_attention import attention

_QUERY_SLICE = 256  # queries per attention call of a prefill row; bounds the mask to this many rows
_GROUP_WASTE_MAX = 0.25  # share of padding blocks that a group of decodes may gather
_GROUP_TOKENS_MAX = 1 << 14  # context tokens gathered at a time; bounds the buffers, and a longer row goes alone


class TorchBackend:
    """Works on any device; the one for CPUs."""

    def __init__(self, pool: KvPool, heads: Heads) -> None:
        self._pool = pool
        self.heads = heads
        self.arithmetic: Arithmetic = TorchArithmetic()
        self._buffers: list[torch.Tensor] = [self.new_zeros((0,)), self.new_zeros((0,))]
        self._causal = self.new_zeros((_QUERY_SLICE, 0))
        self._windowed: dict[int, torch.Tensor] = {}

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

    def gather(self, layer: int, rows: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of block rows [N], each [N, block * D], in buffers that the next gather overwrites.

        `hidden` names token rows of the result that hold no token which is seen: they are zeroed, as an
        earlier occupant's NaN or infinity would get through a mask.
        """
        pool, blocks = self._pool, self._pool.layer(layer)
        width = pool.block_size * pool.shape.head_dim
        wanted = rows.numel() * width
        results = []
        for plane, (stored, scales) in enumerate(
            ((blocks.keys, blocks.key_scales), (blocks.values, blocks.value_scales))
        ):
            if self._buffers[plane].numel() < wanted:
                self._buffers[plane] = self.new_zeros((wanted + wanted // 2,))
            out = self._buffers[plane][:wanted].view(-1, width)
            if scales is None:
                torch.index_select(stored.view(-1, width), 0, rows, out=out)
            else:
                _gather_float8(stored.view(-1, width), scales.view(-1, pool.block_size), rows, out)
            out.view(-1, pool.shape.head_dim).index_fill_(0, hidden, 0)
            results.append(out)
        return results[0], results[1]

    def new_zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Of the type that attention is computed in."""
        return torch.zeros(shape, dtype=self._pool.content_dtype, device=self._pool.storage.device)

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

    def windowed_mask(self, num_queries: int, num_keys: int, window: int) -> torch.Tensor:
        """Like `causal_mask`, and each query sees no more than `window` keys, its own the last of them."""
        reach = window - 1
        assert num_keys <= num_queries + reach
        if window not in self._windowed:
            visible = torch.ones((_QUERY_SLICE, _QUERY_SLICE + reach), dtype=torch.bool).triu_().tril_(reach)
            hidden = ~visible.to(self._causal.device)
            self._windowed[window] = self._causal.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        end = num_queries + reach
        return self._windowed[window][:num_queries, end - num_keys : end]


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
        groups = _group_by_length(batch, decodes, pool.block_size)
        self._parts: list[Callable[[int, torch.Tensor, torch.Tensor], None]] = [
            _DecodeGroup(backend, batch, rows).attend for rows in groups
        ]
        self._parts += [PrefillRow(backend, batch, int(row)).attend for row in np.flatnonzero(new_tokens > 1)]

    def write(self, layer: int, qkv: torch.Tensor, angles: Angles) -> torch.Tensor:
        pool, heads = self._backend.pool, self._backend.heads
        num_rotated = heads.num_heads + pool.shape.num_kv_heads
        norms = heads.layers[layer].head_norms
        if norms is not None:
            norm_heads(qkv[:, :num_rotated], heads.num_heads, norms)
        rotated = rotate(qkv[:, :num_rotated], angles)
        key, value = rotated[:, heads.num_heads :], qkv[:, num_rotated:]
        blocks = pool.layer(layer)
        self._store(blocks.keys, blocks.key_scales, key)
        self._store(blocks.values, blocks.value_scales, value)
        return rotated[:, : heads.num_heads]

    def _store(self, stored: torch.Tensor, scales: torch.Tensor | None, heads: torch.Tensor) -> None:
        """Puts heads [T, HK, D] into their slots."""
        head_dim = heads.shape[-1]
        rows = heads.reshape(-1, head_dim)
        if scales is not None:
            narrow, row_scales = to_float8(rows)
            scales.view(-1).index_copy_(0, self._token_rows, row_scales)
            # Few operations know float8; moving bytes does.
            rows, stored = narrow.view(torch.uint8), stored.view(torch.uint8)
        stored.view(-1, head_dim).index_copy_(0, self._token_rows, rows)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for attend in self._parts:
            attend(layer, query, out)
        return out.view(query.shape[0], -1)


class _Context:
    """Where the context of some sequence rows lies: rows [B], `num_blocks` blocks each after padding.

    With a window, it begins with the first block that the row's first new token sees something of.
    """

    def __init__(self, backend: TorchBackend, batch: StepBatch, rows: Int64, window: int | None) -> None:
        pool = backend.pool
        block_size, num_kv_heads = pool.block_size, pool.shape.num_kv_heads
        lens: Int64 = batch.context_lens[rows].astype(np.int64)
        new_tokens = np.diff(batch.query_starts)[rows]
        firsts = np.zeros_like(lens) if window is None else np.maximum(0, lens - new_tokens - (window - 1))
        start_blocks = firsts // block_size
        end_blocks = -(-lens // block_size)
        self.lens: Int64 = lens - start_blocks * block_size  # tokens from the beginning of the first block
        self.num_blocks = int((end_blocks - start_blocks).max())
        num_tokens = self.num_blocks * block_size
        columns = np.minimum(start_blocks[:, None] + np.arange(self.num_blocks), end_blocks[:, None] - 1)
        table = np.take_along_axis(batch.block_tables[rows].astype(np.int64), columns, axis=1)
        heads = np.arange(num_kv_heads)[None, :, None]
        self._block_rows = backend.to_device((table[:, None, :] * num_kv_heads + heads).reshape(-1))
        self._shape = (len(rows), num_kv_heads, num_tokens, pool.shape.head_dim)
        positions = start_blocks[:, None] * block_size + np.arange(num_tokens)
        hidden = (positions >= lens[:, None]) | (positions < firsts[:, None])  # [B, tokens]
        every_head = np.broadcast_to(hidden[:, None, :], self._shape[:3])
        self._hidden = backend.to_device(np.flatnonzero(every_head))
        self.mask = backend.new_zeros((len(rows), 1, 1, num_tokens))
        self.mask.view(len(rows), -1).masked_fill_(torch.from_numpy(hidden).to(self.mask.device), float("-inf"))
        self._backend = backend

    def gather(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each [B, HK, tokens, D]; valid until the next gather."""
        keys, values = self._backend.gather(layer, self._block_rows, self._hidden)
        return keys.view(self._shape), values.view(self._shape)


class _Contexts:
    """The contexts of some sequence rows, one for each window of the layers that ask."""

    def __init__(self, backend: TorchBackend, batch: StepBatch, rows: Int64) -> None:
        self._backend = backend
        self._batch = batch
        self._rows = rows
        self._longest = int(batch.context_lens[rows].max())
        self._made: dict[int | None, _Context] = {}

    def of(self, layer: int) -> tuple[_Context, int | None]:
        """A layer's context, and its window where that hides something."""
        window = self._backend.heads.layers[layer].window
        if window is not None and window >= self._longest:
            window = None
        if window not in self._made:
            self._made[window] = _Context(self._backend, self._batch, self._rows, window)
        return self._made[window], window


class _DecodeGroup:
    """Rows with one new token each and contexts of similar length."""

    def __init__(self, backend: TorchBackend, batch: StepBatch, rows: Int64) -> None:
        self._backend = backend
        self._contexts = _Contexts(backend, batch, rows)
        self._tokens = backend.to_device(batch.query_starts[rows])
        shape = backend.pool.shape
        group = backend.heads.num_heads // shape.num_kv_heads
        self._packed = (len(rows), shape.num_kv_heads, group, 1, shape.head_dim)

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        context, _ = self._contexts.of(layer)
        keys, values = context.gather(layer)
        packed = query.index_select(0, self._tokens).view(self._packed)
        attended = attention(packed, keys, values, context.mask, self._backend.heads.layers[layer])
        out.index_copy_(0, self._tokens, attended.reshape(len(self._tokens), *query.shape[1:]))


class PrefillRow:
    """One row with several new tokens, after whatever context it already has."""

    def __init__(self, backend: TorchBackend, batch: StepBatch, row: int) -> None:
        self._backend = backend
        self._contexts = _Contexts(backend, batch, np.array([row]))
        self._start, self._end = int(batch.query_starts[row]), int(batch.query_starts[row + 1])

    def attend(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        context, window = self._contexts.of(layer)
        keys, values = context.gather(layer)
        context_len = int(context.lens[0])
        for start in range(self._start, self._end, _QUERY_SLICE):
            end = min(start + _QUERY_SLICE, self._end)
            last = context_len - (self._end - end)
            first = 0 if window is None else max(0, last - (end - start) - (window - 1))
            attended = attention(
                query[start:end].view(end - start, keys.shape[1], -1, keys.shape[3]).permute(1, 2, 0, 3).unsqueeze(0),
                keys[:, :, first:last],
                values[:, :, first:last],
                self._mask(end - start, last - first, window),
                self._backend.heads.layers[layer],
            )
            out[start:end] = attended[0].flatten(0, 1).transpose(0, 1)

    def _mask(self, num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
        """[1, 1, queries, keys]"""
        if window is None:
            return self._backend.causal_mask(num_queries, num_keys)[None, None]
        return self._backend.windowed_mask(num_queries, num_keys, window)[None, None]


def _gather_float8(stored: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Block rows [N] of stored [num_blocks * HK, block * D] float8, times scales [num_blocks * HK, block], into out."""
    wide = stored.view(torch.uint8).index_select(0, rows).view(stored.dtype).float()
    block_size = scales.shape[1]
    factors = scales.index_select(0, rows).unsqueeze(-1)
    torch.mul(wide.view(len(rows), block_size, -1), factors, out=wide.view(len(rows), block_size, -1))
    out.copy_(wide)


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
