"""Paged attention for rows with one new token: each program attends over the pieces of its span (see `split_kv`).

The G query heads of a KV head share each loaded tile. Operands are swapped: scores are K q^T [tokens, G] and the
output is V^T p [D, G], so that the long sides (tokens, D) fill the matrix unit's 64 rows and the few query heads are
its narrow side. Rows that begin with the same blocks have their query heads side by side in one launch over what they
share (`cascade`), and their own launch goes on behind it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.pool import LayerBlocks
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.attention.arrays import DecodeScratch, Prefixes, StepArrays
from coppice_worker.kernels.triton.attention.split_kv import join, shared_prefixes
from coppice_worker.kernels.triton.overlap import begin, overlapping

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806  (compile-time constants are upper case, as everywhere in Triton)

_LOG2_E = math.log2(math.e)
_COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _seen(tile, context, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """[TILE] whether the newest token sees each of a tile's."""
    position = tile * TILE + tl.arange(0, TILE)
    seen = position < context
    if WINDOW > 0:
        seen &= position >= context - WINDOW
    return seen


@triton.jit
def _slots(table, tile, seen, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """[TILE] block of each of a tile's tokens, and offset in it. Of what is not seen no table entry is read."""
    token = tl.arange(0, TILE)
    if TILE % BLOCK_SIZE == 0:  # the usual sizes: the same offsets in each tile
        index, offset = tile * (TILE // BLOCK_SIZE) + token // BLOCK_SIZE, token % BLOCK_SIZE
    else:
        index, offset = (tile * TILE + token) // BLOCK_SIZE, (tile * TILE + token) % BLOCK_SIZE
    return tl.load(table + index, mask=seen, other=0), offset


@triton.jit
def _weights(score, seen, highest, cap_log2, CAPPED: tl.constexpr):
    """Of scores [TILE, COLUMNS], those of what is not seen 0; what earlier weights shrink to; the highest score."""
    if CAPPED:
        # cap * tanh(x), with 2 log2(e) / cap in the scale; an overflow to infinity gives the cap.
        score = cap_log2 - 2 * cap_log2 / (1 + tl.exp2(score))
    score = tl.where(seen[:, None], score, float("-inf"))
    higher = tl.maximum(highest, tl.max(score, axis=0))
    return tl.exp2(score - higher[None, :]), tl.exp2(highest - higher), higher


@triton.jit
def _attend_tiles(
    query,  # [D, COLUMNS]
    key_pool_ptr,
    value_pool_ptr,
    table,
    kv_head,
    first_tile,
    num_tiles,
    context,
    scale_log2,
    cap_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Online softmax over some tiles of a context; each has a token that is seen. Output [D, COLUMNS] and its lse."""
    HEAD_PADDED: tl.constexpr = query.shape[0]
    COLUMNS: tl.constexpr = query.shape[1]
    dim = tl.arange(0, HEAD_PADDED)
    highest = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([TILE, COLUMNS], tl.float32)  # added up at the end: a sum over tokens goes across all warps
    out = tl.zeros([HEAD_PADDED, COLUMNS], tl.float32)
    # The next tile's blocks are looked up a tile ahead, so that the copies of K and V wait for nothing.
    next_block, next_offset = _slots(table, first_tile, _seen(first_tile, context, WINDOW, TILE), BLOCK_SIZE, TILE)
    for tile in range(first_tile, first_tile + num_tiles):
        seen, block, offset = _seen(tile, context, WINDOW, TILE), next_block, next_offset
        next_block, next_offset = _slots(table, tile + 1, _seen(tile + 1, context, WINDOW, TILE), BLOCK_SIZE, TILE)
        token = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + offset).to(tl.int64)
        at = token[:, None] * HEAD_DIM + dim[None, :]
        mask = seen[:, None] & (dim[None, :] < HEAD_DIM)
        key = tl.load(key_pool_ptr + at, mask=mask, other=0.0)
        score = tl.dot(key, query, input_precision="ieee") * scale_log2  # [TILE, COLUMNS], in powers of two
        weight, shrink, highest = _weights(score, seen, highest, cap_log2, CAPPED)
        total = total * shrink[None, :] + weight
        value = tl.load(value_pool_ptr + at, mask=mask, other=0.0)
        out = out * shrink[None, :]
        out = tl.dot(tl.trans(value), weight.to(value.dtype), out, input_precision="ieee")
    summed = tl.sum(total, axis=0)
    return out / summed[None, :], highest + tl.log2(summed)


@triton.jit
def _read_tile(
    key_pool_ptr, value_pool_ptr, key_scales_ptr, value_scales_ptr, block, offset, seen, kv_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Keys and values [TILE, D] of float8, and their scales [TILE]."""
    dim = tl.arange(0, HEAD_PADDED)
    token = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + offset).to(tl.int64)
    at = token[:, None] * HEAD_DIM + dim[None, :]
    mask = seen[:, None] & (dim[None, :] < HEAD_DIM)
    key = tl.load(key_pool_ptr + at, mask=mask, other=0.0)
    value = tl.load(value_pool_ptr + at, mask=mask, other=0.0)
    key_scales = tl.load(key_scales_ptr + token, mask=seen, other=0.0)
    return key, value, key_scales, tl.load(value_scales_ptr + token, mask=seen, other=0.0)


@triton.jit
def _attend_float8(
    query,  # [D, COLUMNS]
    key_pool_ptr,
    value_pool_ptr,
    key_scales_ptr,
    value_scales_ptr,
    table,
    kv_head,
    first_tile,
    num_tiles,
    context,
    scale_log2,
    cap_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The same over float8, whose tiles are in registers a tile ahead.

    Matrix units take neither float8 beside half precision nor a transposed tile of it. Converted in the iteration that
    multiplies it, a tile came to registers byte by byte, in the order of the matrix unit. So a tile is read to
    registers 16 bytes at a time, converted, and carried to the next iteration: there it is half precision like any
    other, which a matrix unit takes from shared memory in either order. (Copies to shared memory that are several tiles
    ahead take a quarter longer on an H200: what a tile waits for is its own chain of products and sums.)
    """
    HEAD_PADDED: tl.constexpr = query.shape[0]
    COLUMNS: tl.constexpr = query.shape[1]
    highest = tl.full([COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([TILE, COLUMNS], tl.float32)
    out = tl.zeros([HEAD_PADDED, COLUMNS], tl.float32)
    largest = tl.full([], 1e-30, tl.float32)  # of the values' scales; `out` is in units of it
    end = first_tile + num_tiles
    seen = _seen(first_tile, context, WINDOW, TILE)
    block, offset = _slots(table, first_tile, seen, BLOCK_SIZE, TILE)
    next_key, next_value, key_scales, value_scales = _read_tile(
        key_pool_ptr, value_pool_ptr, key_scales_ptr, value_scales_ptr, block, offset, seen, kv_head,
        NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE,
    )  # fmt: skip
    key, value = next_key.to(query.dtype), next_value.to(query.dtype)
    next_seen = _seen(first_tile + 1, context, WINDOW, TILE) & (first_tile + 1 < end)
    block, offset = _slots(table, first_tile + 1, next_seen, BLOCK_SIZE, TILE)
    for tile in range(first_tile, end):
        next_key, next_value, next_key_scales, next_value_scales = _read_tile(
            key_pool_ptr, value_pool_ptr, key_scales_ptr, value_scales_ptr, block, offset, next_seen, kv_head,
            NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE,
        )  # fmt: skip
        seen_then = _seen(tile + 2, context, WINDOW, TILE) & (tile + 2 < end)
        block, offset = _slots(table, tile + 2, seen_then, BLOCK_SIZE, TILE)
        score = tl.dot(key, query, input_precision="ieee") * (scale_log2 * key_scales)[:, None]
        weight, shrink, highest = _weights(score, seen, highest, cap_log2, CAPPED)
        total = total * shrink[None, :] + weight
        # In units of the largest scale seen, so that no product leaves the range of half precision.
        larger = tl.maximum(largest, tl.max(value_scales, axis=0))
        weight *= (value_scales / larger)[:, None]
        out = out * (shrink * (largest / larger))[None, :]
        out = tl.dot(tl.trans(value), weight.to(value.dtype), out, input_precision="ieee")
        largest = larger
        seen, next_seen = next_seen, seen_then
        key, value = next_key.to(query.dtype), next_value.to(query.dtype)
        key_scales, value_scales = next_key_scales, next_value_scales
    out *= largest
    summed = tl.sum(total, axis=0)
    return out / summed[None, :], highest + tl.log2(summed)


@triton.jit
def _find_row(starts_ptr, num_rows, tile, ROWS: tl.constexpr):
    """The row that a tile of the line belongs to."""
    row = tl.full([], 0, tl.int32)
    for first in range(0, num_rows, ROWS):
        at = first + tl.arange(0, ROWS)
        end = tl.load(starts_ptr + 1 + at, mask=at < num_rows, other=2147483647)
        row += tl.sum((end <= tile).to(tl.int32), 0)
    return row


@triton.jit
def _rows_of(members_ptr, row, GROUP: tl.constexpr, MEMBERS: tl.constexpr, COLUMNS: tl.constexpr):
    """Whose table to read, and each column's row and whether there is one."""
    column = tl.arange(0, COLUMNS)
    if members_ptr is None:
        reader, query_row, real = row, row + tl.zeros([COLUMNS], tl.int32), column < GROUP
    else:
        reader = tl.load(members_ptr + row * MEMBERS)
        member = column // GROUP
        query_row = tl.load(members_ptr + row * MEMBERS + member, mask=member < MEMBERS, other=-1)
        real = query_row >= 0
    return reader, query_row, real


# Values that change from step to step must not each compile a kernel of their own.
@triton.jit(do_not_specialize=["table_width", "num_rows"])
def decode_kernel(
    query_ptr,  # [T, H, D], token rows `query_stride` elements apart
    key_pool_ptr,  # [num_blocks, HK, BLOCK_SIZE, D]
    value_pool_ptr,
    key_scales_ptr,  # [num_blocks, HK, BLOCK_SIZE] float32; None but for float8
    value_scales_ptr,
    tables_ptr,  # [S, table_width] int32
    context_lens_ptr,  # [S] int32
    query_starts_ptr,  # [S + 1] int32
    starts_ptr,  # [num_rows + 1] int32, first tile of each row (or group), counted over rows and KV heads
    firsts_ptr,  # [S] int32, first tile of each row's context to read; None for groups, which begin at their beginning
    members_ptr,  # [groups, MEMBERS] int32, rows whose query heads are side by side; None: each row for itself
    partial_ptr,  # [pieces, MEMBERS * GROUP, D] float32
    lse_ptr,  # [pieces, MEMBERS * GROUP] float32
    query_stride,
    table_width,
    num_rows,  # S, or groups
    scale_log2,  # softmax scale * log2(e); if CAPPED, times 2 / cap
    cap_log2,  # cap * log2(e)
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    MEMBERS: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two >= max(MEMBERS * GROUP, 16)
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,  # power of two >= HEAD_DIM
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,  # context tokens per iteration
    COMPUTE: tl.constexpr,  # of the products: queries and blocks are converted to it
):
    program = tl.program_id(0)
    begin()
    per_program = tl.cdiv(tl.load(starts_ptr + num_rows), tl.num_programs(0))
    tile = program * per_program
    last = tl.minimum(tile + per_program, tl.load(starts_ptr + num_rows))
    row = _find_row(starts_ptr, num_rows, tile, 128)
    column, dim = tl.arange(0, COLUMNS), tl.arange(0, HEAD_PADDED)
    while tile < last:
        while tl.load(starts_ptr + row + 1) <= tile:
            row += 1
        row_start = tl.load(starts_ptr + row)
        row_tiles = (tl.load(starts_ptr + row + 1) - row_start) // NUM_KV_HEADS
        kv_head = (tile - row_start) // row_tiles
        within = tile - row_start - kv_head * row_tiles
        num_tiles = tl.minimum(row_tiles - within, last - tile)
        reader, query_row, real = _rows_of(members_ptr, row, GROUP, MEMBERS, COLUMNS)
        context, first_tile = row_tiles * TILE, within  # of a group, which begins at the beginning
        if members_ptr is None:
            context, first_tile = tl.load(context_lens_ptr + row), tl.load(firsts_ptr + row) + within
        token = tl.load(query_starts_ptr + query_row, mask=real, other=0).to(tl.int64)
        head = kv_head * GROUP + column % GROUP
        query_at = token[None, :] * query_stride + head[None, :] * HEAD_DIM + dim[:, None]
        query = tl.load(query_ptr + query_at, mask=real[None, :] & (dim[:, None] < HEAD_DIM), other=0.0).to(COMPUTE)
        table = tables_ptr + reader.to(tl.int64) * table_width
        if key_scales_ptr is None:
            out, lse = _attend_tiles(
                query, key_pool_ptr, value_pool_ptr, table, kv_head, first_tile, num_tiles, context,
                scale_log2, cap_log2, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, CAPPED, TILE,
            )  # fmt: skip
        else:
            out, lse = _attend_float8(
                query, key_pool_ptr, value_pool_ptr, key_scales_ptr, value_scales_ptr, table, kv_head, first_tile,
                num_tiles, context, scale_log2, cap_log2, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, CAPPED, TILE,
            )  # fmt: skip
        piece = (program + row * NUM_KV_HEADS + kv_head).to(tl.int64) * (MEMBERS * GROUP) + column
        out_at = piece[None, :] * HEAD_DIM + dim[:, None]
        tl.store(partial_ptr + out_at, out, mask=real[None, :] & (dim[:, None] < HEAD_DIM))
        tl.store(lse_ptr + piece, lse, mask=real)
        tile += num_tiles


def decode(
    query: torch.Tensor,
    blocks: LayerBlocks,
    arrays: StepArrays,
    scratch: DecodeScratch,
    layer: LayerAttention,
    out: torch.Tensor,
) -> None:
    """Attends for the rows with one new token: query and out [T, H, D], out contiguous."""
    if not arrays.has_decodes:
        return
    shared = shared_prefixes(arrays, layer.window)
    if shared is not None:
        attend_spans(query, blocks, arrays, scratch, layer, shared)
    attend_spans(query, blocks, arrays, scratch, layer, None)
    join(query, arrays, scratch, layer, out)


def attend_spans(
    query: torch.Tensor,
    blocks: LayerBlocks,
    arrays: StepArrays,
    scratch: DecodeScratch,
    layer: LayerAttention,
    shared: Prefixes | None,
) -> Any:
    """Leaves partial results of all rows, or of all groups for what their rows share. The kernel that was launched."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = blocks.keys.shape[1:3]
    group = num_heads // num_kv_heads
    index = scratch.windows.index(layer.window)
    if shared is None:
        members, starts, partials, num_rows = 1, scratch.starts[index], scratch.own, arrays.context_lens.numel()
    else:
        members, starts, partials, num_rows = (
            shared.members.shape[1],
            shared.starts,
            scratch.shared,
            len(shared.members),
        )
    programs = scratch.programs if shared is None else scratch.shared_programs
    cap, columns = layer.soft_cap, members * group
    return decode_kernel[(programs,)](
        query, blocks.keys, blocks.values, blocks.key_scales, blocks.value_scales,
        arrays.tables, arrays.context_lens, arrays.query_starts, starts,
        scratch.firsts[index] if shared is None else None, shared and shared.members, partials.out, partials.lse,
        query.stride(0), arrays.tables.stride(0), num_rows,
        layer.scale * _LOG2_E * (2 / cap if cap else 1), (cap or 0) * _LOG2_E,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, MEMBERS=members, COLUMNS=launch.padded(columns),
        HEAD_DIM=head_dim, HEAD_PADDED=launch.padded(head_dim), BLOCK_SIZE=block_size, WINDOW=layer.window or 0,
        CAPPED=cap is not None, TILE=launch.DECODE_TILE, COMPUTE=_COMPUTE[_compute(query, blocks)],
        **launch.decode_options(head_dim, columns, blocks.key_scales is not None), **overlapping(query.shape[0]),
    )  # fmt: skip


def _compute(query: torch.Tensor, blocks: LayerBlocks) -> torch.dtype:
    """Float8 becomes float16, where the chip has an instruction for it; bfloat16 would take several."""
    return query.dtype if blocks.key_scales is None or query.dtype == torch.float32 else torch.float16
