"""Paged attention for rows with several new tokens: chunks of a prefill after any amount of context.

    a row's context   |======== before this step ========|--- new tokens ---|     all of it already in its blocks
    a program         a tile of ROWS query rows = (new token, query head of one KV head), packed token-major
    its context       . . . |~masked~|===== seen by all its rows =====|~masked~|     from its window's first token on

Online softmax: Dao et al. 2022 (FlashAttention). Query heads of one KV head share the tile, so K and V are read once
for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.pool import LayerBlocks
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.attention.arrays import StepArrays
from coppice_worker.kernels.triton.attention.extend_launch import EXTEND_ROWS, extend_shape, score_factors
from coppice_worker.kernels.triton.attention.extend_pieces import join

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806  (compile-time constants are upper case, as everywhere in Triton)


@triton.jit
def _kv_rows(
    table, first, last, kv_head,
    MASKED: tl.constexpr, NARROW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """[TILE] int64: token rows of the pool, seen as [num_blocks * HK * BLOCK_SIZE, D], of positions `first` and on."""
    offset = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0 and not MASKED:  # a whole tile, in one block
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        return (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + first % BLOCK_SIZE + offset
    if NARROW and TILE % BLOCK_SIZE == 0 and not MASKED:  # 32 bits can number the rows: an eighth of the loop less
        block = tl.load(table + first // BLOCK_SIZE + offset // BLOCK_SIZE)
        return ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + offset % BLOCK_SIZE).to(tl.int64)
    position = first + offset
    # Beyond `last` no table entry is read.
    block = tl.load(table + position // BLOCK_SIZE, mask=position < last, other=0).to(tl.int64)
    return (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def _read(
    pool_ptr, kv_row, inside,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr,
):  # fmt: skip
    """[TILE, HEAD_PADDED] keys or values; nothing is read where not `inside`."""
    column = tl.arange(0, HEAD_PADDED)
    at = pool_ptr + kv_row[:, None] * HEAD_DIM + column[None, :]
    if MASKED:
        return tl.load(at, mask=inside[:, None] & (column[None, :] < HEAD_DIM), other=0.0)
    if HEAD_DIM != HEAD_PADDED:
        return tl.load(at, mask=column[None, :] < HEAD_DIM, other=0.0)
    return tl.load(at)


@triton.jit
def _products(query, key):
    """Scores before anything else is done to them, [ROWS, TILE]."""
    return tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")


@triton.jit
def _bent(score, key_scales_ptr, kv_row, inside, bend, CAPPED: tl.constexpr):
    """Scales of keys, and tanh(score / cap)."""
    if key_scales_ptr is not None:
        score = score * tl.load(key_scales_ptr + kv_row, mask=inside, other=0.0)[None, :]
    if CAPPED:
        score = 1.0 - 2.0 / (tl.exp2(score * bend) + 1.0)
    return score


@triton.jit
def _add_values(
    score, highest, total, out, largest, value_pool_ptr, value_scales_ptr, kv_row, inside, log2_scale,
    MASKED: tl.constexpr, MAY_BE_EMPTY: tl.constexpr, COMPUTE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax. `largest` is that of the values' scales, and `out` is in units of it: whatever
    the scales, no product leaves the range of half precision."""
    higher = tl.maximum(highest, tl.max(score, axis=1) * log2_scale)
    base = higher
    if MAY_BE_EMPTY:  # a row that has seen nothing yet must not subtract infinity from itself
        base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(score * log2_scale - base[:, None])
    shrink = tl.exp2(highest - base)
    total = total * shrink + tl.sum(weight, axis=1)
    if value_scales_ptr is not None:
        scales = tl.load(value_scales_ptr + kv_row, mask=inside, other=0.0)
        larger = tl.maximum(largest, tl.max(scales, axis=0))
        weight = weight * (scales / larger)[None, :]
        shrink = shrink * (largest / larger)
        largest = larger
    value = _read(value_pool_ptr, kv_row, inside, MASKED, HEAD_DIM, HEAD_PADDED).to(COMPUTE)
    out = out * shrink[:, None]
    out = tl.dot(weight.to(COMPUTE), value, out, input_precision="ieee")
    return higher, total, out, largest


@triton.jit
def _attend(
    query, highest, total, out, largest, first_position, last_position, query_position, table, kv_head,
    key_pool_ptr, value_pool_ptr, key_scales_ptr, value_scales_ptr, bend, log2_scale,
    MASKED: tl.constexpr, MAY_BE_EMPTY: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Context positions [first_position, last_position), one tile after the other."""
    for first in range(first_position, last_position, TILE):
        position = first + tl.arange(0, TILE)
        inside = position < last_position
        # Conversions of float8 leave no registers for narrow numbers that become wide.
        narrow: tl.constexpr = key_scales_ptr is None
        kv_row = _kv_rows(table, first, last_position, kv_head, MASKED, narrow, NUM_KV_HEADS, BLOCK_SIZE, TILE)
        score = _products(query, _read(key_pool_ptr, kv_row, inside, MASKED, HEAD_DIM, HEAD_PADDED))
        score = _bent(score, key_scales_ptr, kv_row, inside, bend, CAPPED)
        if MASKED:
            seen = position[None, :] <= query_position[:, None]
            if WINDOW > 0:
                seen = seen & (position[None, :] > query_position[:, None] - WINDOW)
            score = tl.where(seen & inside[None, :], score, float("-inf"))
        highest, total, out, largest = _add_values(
            score, highest, total, out, largest, value_pool_ptr, value_scales_ptr, kv_row, inside, log2_scale,
            MASKED, MAY_BE_EMPTY, query.dtype, HEAD_DIM, HEAD_PADDED,
        )  # fmt: skip
    return highest, total, out, largest


@triton.jit
def _attend_to_all(
    query, highest, total, out, largest, first_query, start, end, query_position, table, kv_head,
    key_pool_ptr, value_pool_ptr, key_scales_ptr, value_scales_ptr, bend, log2_scale,
    CAPPED: tl.constexpr, WINDOW: tl.constexpr, IN_PIECES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """What rows from position `first_query` on see of positions [start, end); `start` is the start of a tile."""
    # Masked tiles come first, and each row sees something in the first of them: the token at `whole_end`, unless its
    # window is narrow or the piece small. (With the masked loop behind the other, ptxas made all matrix instructions
    # wait for each other.)
    whole, whole_end = start, first_query // TILE * TILE
    if IN_PIECES:
        whole_end = tl.maximum(tl.minimum(whole_end, end), start)
    if WINDOW > 0:
        whole = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE, end)
        whole_end = tl.maximum(whole, whole_end)
    highest, total, out, largest = _attend(
        query, highest, total, out, largest, whole_end, end, query_position, table, kv_head,
        key_pool_ptr, value_pool_ptr, key_scales_ptr, value_scales_ptr, bend, log2_scale,
        True, IN_PIECES or WINDOW > 0, CAPPED, WINDOW, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE, TILE,
    )  # fmt: skip
    if WINDOW > 0:
        highest, total, out, largest = _attend(
            query, highest, total, out, largest, tl.maximum(first_query - WINDOW + 1, 0), whole, query_position,
            table, kv_head,
            key_pool_ptr, value_pool_ptr, key_scales_ptr, value_scales_ptr, bend, log2_scale,
            True, True, CAPPED, WINDOW, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE, TILE,
        )  # fmt: skip
    highest, total, out, largest = _attend(
        query, highest, total, out, largest, whole, whole_end, query_position, table, kv_head,
        key_pool_ptr, value_pool_ptr, key_scales_ptr, value_scales_ptr, bend, log2_scale,
        False, False, CAPPED, WINDOW, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE, TILE,
    )  # fmt: skip
    return highest, total, out, largest


@triton.jit
def _my_piece(tile_rows_ptr, tile_starts_ptr, pieces_ptr):
    """Sequence row and first packed query row; the context from, to, and where the result goes, as in `Cut.pieces`."""
    tile = tl.program_id(0)
    if pieces_ptr is None:
        return tl.load(tile_rows_ptr + tile), tl.load(tile_starts_ptr + tile), 0, 2147483647, -1
    else:  # noqa: RET505  the compiler would look at what is behind in either case
        at, step = pieces_ptr + tile, tl.num_programs(0)
        return tl.load(at), tl.load(at + step), tl.load(at + 2 * step), tl.load(at + 3 * step), tl.load(at + 4 * step)


@triton.jit
def _begin(sinks_ptr, head, start, IN_PIECES: tl.constexpr):
    """The largest score so far of each row, in powers of two, the sum of weights, and the largest scale of values."""
    ROWS: tl.constexpr = head.shape[0]
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        highest = tl.load(sinks_ptr + head) * 1.4426950408889634
        total += 1.0
        if IN_PIECES:  # the first one counts them, for all
            highest = tl.where(start == 0, highest, float("-inf"))
    return highest, total, tl.full([], 1e-30, tl.float32)


@triton.jit
def _keep(result, first_row, highest, total, out, results_ptr, lse_ptr, HEAD_DIM: tl.constexpr):
    """Leaves a piece's result to be joined, if it has a number. Sums of weights, 1 for rows that saw nothing of it."""
    ROWS: tl.constexpr = out.shape[0]
    at, column = first_row + tl.arange(0, ROWS), tl.arange(0, out.shape[1])
    kept = result + tl.zeros([ROWS], tl.int32) >= 0
    total = tl.where(total > 0, total, 1.0)  # else `highest` is -inf, and so is the result's
    tl.store(lse_ptr + at, highest + tl.log2(total), mask=kept)
    mask = kept[:, None] & (column[None, :] < HEAD_DIM)
    tl.store(results_ptr + at[:, None] * HEAD_DIM + column[None, :], out / total[:, None], mask=mask)
    return total


# Values that change from step to step must not each compile a kernel of their own.
@triton.jit(do_not_specialize=["table_stride"])
def extend_kernel(
    query_ptr,  # [T, H, D], token rows `query_stride` elements apart
    key_pool_ptr,  # [num_blocks, HK, BLOCK_SIZE, D]
    value_pool_ptr,
    key_scales_ptr,  # [num_blocks, HK, BLOCK_SIZE] float32, or None
    value_scales_ptr,
    sinks_ptr,  # [H] float32, or None
    tables_ptr,  # [S, table_width] int32, rows `table_stride` apart
    context_lens_ptr,  # [S] int32, this step's tokens included
    query_starts_ptr,  # [S + 1] int32
    tile_rows_ptr,  # [tiles] int32, sequence row of each query tile; -1: there is none
    tile_starts_ptr,  # [tiles] int32, its first packed query row, counted from the row's first new token
    pieces_ptr,  # [5, tiles] int32, see `Cut.pieces`, in place of the two before it; None where nothing is cut
    results_ptr,  # [results, HK, all rows of a tile, D] float32
    lse_ptr,  # [results, HK, all rows of a tile] float32
    out_ptr,  # [T, H, D] contiguous
    query_stride,
    table_stride,
    bend,  # see `score_factors`
    log2_scale,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens that a token sees; 0: all before it
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # packed query rows per program, of which a tile has one or several
    TILE: tl.constexpr,  # context tokens per iteration
):
    row, tile_start, start, piece_end, result = _my_piece(tile_rows_ptr, tile_starts_ptr, pieces_ptr)
    if row < 0:
        return
    kv_head, tile_start = tl.program_id(1), tile_start + tl.program_id(2) * ROWS
    first_token = tl.load(query_starts_ptr + row)
    num_new = tl.load(query_starts_ptr + row + 1) - first_token
    num_before = tl.load(context_lens_ptr + row) - num_new
    if tile_start >= num_new * GROUP:
        return
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
    if key_scales_ptr is not None and query.dtype == tl.bfloat16:
        query = query.to(tl.float16)  # to which blocks of float8 are converted in one instruction
    table = tables_ptr + row.to(tl.int64) * table_stride
    end = tl.minimum(num_before + tl.minimum((tile_start + ROWS - 1) // GROUP, num_new - 1) + 1, piece_end)
    highest, total, largest = _begin(sinks_ptr, head, start, pieces_ptr is not None)
    out = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    highest, total, out, largest = _attend_to_all(
        query, highest, total, out, largest, num_before + tile_start // GROUP, start, end, query_position,
        table, kv_head, key_pool_ptr, value_pool_ptr, key_scales_ptr, value_scales_ptr, bend, log2_scale,
        CAPPED, WINDOW, pieces_ptr is not None, NUM_KV_HEADS, HEAD_DIM, HEAD_PADDED, BLOCK_SIZE, TILE,
    )  # fmt: skip
    if value_scales_ptr is not None:
        out = out * largest
    if pieces_ptr is not None:
        at = (result.to(tl.int64) * NUM_KV_HEADS + kv_head) * (tl.num_programs(2) * ROWS) + tl.program_id(2) * ROWS
        total = _keep(result, at, highest, total, out, results_ptr, lse_ptr, HEAD_DIM)
        mask = mask & (result + tl.zeros([ROWS], tl.int32) < 0)[:, None]
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
    keys = blocks.keys
    _, num_heads, head_dim = query.shape
    num_kv_heads, block_size = keys.shape[1:3]
    head_padded = launch.padded(head_dim)
    # The interpreter computes in float32, in the shapes that the matrix unit gets.
    shape = extend_shape(head_padded, query.dtype if query.is_cuda else torch.float16, keys.dtype)
    bend, log2_scale = score_factors(layer)
    # A window makes contexts short.
    pieces = arrays.extend_pieces if layer.window is None else None
    num_tiles = arrays.tile_rows.numel() if pieces is None else pieces.pieces.shape[1]
    extend_kernel[(num_tiles, num_kv_heads, EXTEND_ROWS // shape.rows)](
        query, keys, blocks.values, blocks.key_scales, blocks.value_scales, layer.sinks, arrays.tables,
        arrays.context_lens, arrays.query_starts, arrays.tile_rows, arrays.tile_starts,
        pieces and pieces.pieces, pieces and pieces.room.results, pieces and pieces.room.lse, out,
        query.stride(0), arrays.tables.stride(0), bend, log2_scale,
        CAPPED=layer.soft_cap is not None, WINDOW=layer.window or 0,
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, HEAD_PADDED=head_padded,
        BLOCK_SIZE=block_size, ROWS=shape.rows, TILE=shape.tile, **shape.options,
    )  # fmt: skip
    if pieces is not None:
        join(pieces, arrays.query_starts, out)
