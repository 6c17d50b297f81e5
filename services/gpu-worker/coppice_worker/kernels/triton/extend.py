"""Paged attention for rows with several new tokens: chunks of a prefill after any amount of context.

    a row's context   |======== before this step ========|--- new tokens ---|     all of it already in its blocks
    a program         tile of ROWS query rows = (new token, query head of one KV head), packed token-major
    its loop          whole tiles of context that every query row may see, then the masked ones up to the diagonal

Online softmax: Dao et al. 2022 (FlashAttention). Query heads of one KV head share the tile, so K and V are read once
for all of them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.pool import LayerBlocks

from . import launch
from .arrays import StepArrays

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)


@triton.jit
def _attend_tiles(
    query,
    highest,
    total,
    out,
    first_position,
    last_position,
    query_position,
    table,
    key_pool_ptr,
    value_pool_ptr,
    kv_head,
    scale_log2,
    MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Online softmax over context positions [first_position, last_position)."""
    column = tl.arange(0, HEAD_PADDED)
    for first in range(first_position, last_position, TILE):
        position = first + tl.arange(0, TILE)
        # Beyond the last position no table entry is read and no block is touched.
        inside = position < last_position if MASKED else tl.full([TILE], True, tl.int1)
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        kv_row = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
        kv_at = kv_row[:, None] + column[None, :]
        kv_mask = inside[:, None] & (column[None, :] < HEAD_DIM)
        key = tl.load(key_pool_ptr + kv_at, mask=kv_mask, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale_log2  # [ROWS, TILE]
        if MASKED:
            score = tl.where(position[None, :] <= query_position[:, None], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        value = tl.load(value_pool_ptr + kv_at, mask=kv_mask, other=0.0)
        out = out * shrink[:, None]
        out = tl.dot(weight.to(value.dtype), value, out, input_precision="ieee")
        highest = higher
    return highest, total, out


# A value that changes from step to step must not compile a kernel of its own.
@triton.jit(do_not_specialize=["table_width"])
def extend_kernel(
    query_ptr,  # [T, H, D], token rows `query_stride` elements apart
    key_pool_ptr,  # [num_blocks, HK, BLOCK_SIZE, D]
    value_pool_ptr,
    tables_ptr,  # [S, table_width] int32
    context_lens_ptr,  # [S] int32, this step's tokens included
    query_starts_ptr,  # [S + 1] int32
    tile_rows_ptr,  # [tiles] int32, sequence row of each query tile
    tile_starts_ptr,  # [tiles] int32, its first packed query row, counted from the row's first new token
    out_ptr,  # [T, H, D] contiguous
    query_stride,
    table_width,
    scale_log2,  # softmax scale * log2(e)
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # packed query rows per program
    TILE: tl.constexpr,  # context tokens per iteration
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row, tile_start = tl.load(tile_rows_ptr + tile), tl.load(tile_starts_ptr + tile)
    first_token = tl.load(query_starts_ptr + row)
    num_new = tl.load(query_starts_ptr + row + 1) - first_token
    num_before = tl.load(context_lens_ptr + row) - num_new
    packed = tile_start + tl.arange(0, ROWS)
    new_token, head = packed // GROUP, kv_head * GROUP + packed % GROUP
    real = new_token < num_new
    # Rows past the end repeat the last real position, so that no row of the softmax is empty.
    query_position = num_before + tl.minimum(new_token, num_new - 1)
    column = tl.arange(0, HEAD_PADDED)
    mask = real[:, None] & (column[None, :] < HEAD_DIM)
    token = (first_token + new_token).to(tl.int64)
    query_at = token[:, None] * query_stride + head[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(query_ptr + query_at, mask=mask, other=0.0)
    table = tables_ptr + row.to(tl.int64) * table_width
    # Every query row sees all positions up to the first row's own.
    seen_by_all = (num_before + tile_start // GROUP + 1) // TILE * TILE
    last_token = tl.minimum((tile_start + ROWS - 1) // GROUP, num_new - 1)
    end = num_before + last_token + 1
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    highest, total, out = _attend_tiles(
        query, highest, total, out, 0, seen_by_all, query_position, table, key_pool_ptr, value_pool_ptr, kv_head,
        scale_log2, False, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE, TILE,
    )  # fmt: skip
    highest, total, out = _attend_tiles(
        query, highest, total, out, seen_by_all, end, query_position, table, key_pool_ptr, value_pool_ptr, kv_head,
        scale_log2, True, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE, TILE,
    )  # fmt: skip
    out = out / total[:, None]
    out_at = token[:, None] * (NUM_KV_HEADS * GROUP * HEAD_DIM) + head[:, None] * HEAD_DIM + column[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


def extend(
    query: torch.Tensor,
    blocks: LayerBlocks,
    arrays: StepArrays,
    layer: LayerAttention,
    out: torch.Tensor,
) -> None:
    """Attends for the rows with several new tokens; shapes as in `decode`."""
    keys, values = blocks.keys, blocks.values
    _, num_heads, head_dim = query.shape
    num_kv_heads, block_size = keys.shape[1:3]
    head_padded = max(16, triton.next_power_of_2(head_dim))
    extend_kernel[(arrays.tile_rows.numel(), num_kv_heads)](
        query, keys, values, arrays.tables, arrays.context_lens, arrays.query_starts,
        arrays.tile_rows, arrays.tile_starts, out, query.stride(0), arrays.tables.stride(0),
        layer.scale * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, HEAD_PADDED=head_padded,
        BLOCK_SIZE=block_size, ROWS=launch.EXTEND_ROWS, TILE=launch.EXTEND_TILE, **launch.extend_options(head_padded),
    )  # fmt: skip
