"""Tiles of queries whose context is cut into pieces, one program each, and what joins their results.

    a tile's context   |== piece 0 ==|== piece 1 ==|= piece 2 =|
    left by programs      out, lse      out, lse     out, lse       float32, lse = log2 of the sum of the exponentials
    joined                out = sum(out_i * 2^lse_i) / sum(2^lse_i)

Split along the context: Dao et al. 2023 (Flash-Decoding).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.attention.extend_launch import EXTEND_ROWS, JOIN_ROWS

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)


@dataclass(frozen=True, slots=True)
class PieceRoom:
    """For the results of a layer's pieces: made once, as the next layer's come when they are joined."""

    results: torch.Tensor  # [results, HK, EXTEND_ROWS, D] float32
    lse: torch.Tensor  # [results, HK, EXTEND_ROWS] float32


def piece_room(num_results: int, num_kv_heads: int, head_dim: int, device: torch.device) -> PieceRoom:
    lse = torch.empty((num_results, num_kv_heads, EXTEND_ROWS), dtype=torch.float32, device=device)
    return PieceRoom(lse.new_empty((*lse.shape, head_dim)), lse)


@dataclass(frozen=True, slots=True)
class ExtendPieces:
    """One step's pieces on the device; rows as in `extend_launch.Cut`."""

    pieces: torch.Tensor  # [5, P] int32; of row -1: there is none
    joins: torch.Tensor  # [4, J] int32; of row -1: there is none
    room: PieceRoom


@triton.jit(do_not_specialize=["num_joins"])
def join_kernel(
    results_ptr,  # [results, HK, TILE_ROWS, D] float32
    lse_ptr,  # [results, HK, TILE_ROWS] float32; -inf: that row saw nothing of the piece
    joins_ptr,  # [4, num_joins] int32
    query_starts_ptr,  # [S + 1] int32
    out_ptr,  # [T, H, D] contiguous
    num_joins,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,  # packed query rows per program
):
    """One program per some rows of a tile and KV head."""
    join, kv_head = tl.program_id(0), tl.program_id(1)
    row, tile_start = tl.load(joins_ptr + join), tl.load(joins_ptr + num_joins + join)
    if row < 0:
        return
    first = tl.load(joins_ptr + 2 * num_joins + join)
    count = tl.load(joins_ptr + 3 * num_joins + join)
    first_token = tl.load(query_starts_ptr + row)
    num_new = tl.load(query_starts_ptr + row + 1) - first_token
    in_tile, column = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, HEAD_PADDED)
    packed = tile_start + in_tile
    real = packed // GROUP < num_new  # nobody wrote results of the rows behind the last one
    mask = real[:, None] & (column[None, :] < HEAD_DIM)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, HEAD_PADDED], tl.float32)
    for result in range(first, first + count):
        at = (tl.cast(result, tl.int64) * NUM_KV_HEADS + kv_head) * TILE_ROWS + in_tile
        lse = tl.load(lse_ptr + at, mask=real, other=0.0)
        # All rows see something of the first piece, so `higher` is finite from then on.
        higher = tl.maximum(highest, lse)
        shrink, weight = tl.exp2(highest - higher), tl.exp2(lse - higher)
        part = tl.load(results_ptr + at[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
        out = out * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        highest = higher
    token, head = (first_token + packed // GROUP).to(tl.int64), kv_head * GROUP + packed % GROUP
    out_at = (token * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(out_ptr + out_at, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def join(pieces: ExtendPieces, query_starts: torch.Tensor, out: torch.Tensor) -> None:
    """What was left in the pieces' room into out [T, H, D]."""
    results, lse = pieces.room.results, pieces.room.lse
    num_kv_heads, head_dim = results.shape[1], results.shape[3]
    num_joins = pieces.joins.shape[1]
    join_kernel[(num_joins, num_kv_heads, EXTEND_ROWS // JOIN_ROWS)](
        results, lse, pieces.joins, query_starts, out, num_joins,
        NUM_KV_HEADS=num_kv_heads, GROUP=out.shape[1] // num_kv_heads, HEAD_DIM=head_dim,
        HEAD_PADDED=launch.padded(head_dim), TILE_ROWS=EXTEND_ROWS, ROWS=JOIN_ROWS, **launch.COMMON_OPTIONS,
    )  # fmt: skip
