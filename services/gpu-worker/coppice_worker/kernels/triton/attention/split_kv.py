"""Which programs attend to what in decode, whatever the lengths, and how their results are joined.

    tiles       |   row 0, head 0   |   row 0, head 1   | row 1, 0 | row 1, 1 |  of all rows and KV heads, in a line
    spans       |------ program 0 ------|------ program 1 ------|------ program 2 ------|  of equal length
    pieces      |         0         | 1 |       2       |   3   |          |  one for each row and head in a span

A program attends over one piece after the other and leaves its output and log-sum-exp. One piece to the next goes on
to another program or to another (row, head), so `program + row * HK + head` numbers them, and those of one (row, head)
are neighbours. The reduce kernel joins them: out = sum(out_i * 2^(lse_i - lse)), lse = log2(sum(2^lse_i)).

Split-KV with log-sum-exp: Dao et al. 2023 (Flash-Decoding). Spans of equal length: Sanovar et al. 2024 (LeanAttention).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.attention.arrays import DecodeScratch, Prefixes, StepArrays
from coppice_worker.kernels.triton.overlap import begin, overlapping

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)


@triton.jit(do_not_specialize=["num_rows"])
def plan_kernel(
    context_lens_ptr,  # [S] int32
    query_starts_ptr,  # [S + 1] int32
    places_ptr,  # [S] int32, group * MEMBERS + member or -1; None where nobody shares
    group_starts_ptr,  # [groups + 1] int32
    starts_ptr,  # [S + 1] int32
    firsts_ptr,  # [S] int32
    num_rows,
    NUM_KV_HEADS: tl.constexpr,
    MEMBERS: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    TILE: tl.constexpr,
    ROWS: tl.constexpr,  # rows per iteration
):
    """One program: the first tile of each row's context to read, and its place in the line of all tiles."""
    before = tl.full([], 0, tl.int32)
    tl.store(starts_ptr, before)
    for first_row in range(0, num_rows, ROWS):
        row = first_row + tl.arange(0, ROWS)
        inside = row < num_rows
        context = tl.load(context_lens_ptr + row, mask=inside, other=0)
        start = tl.load(query_starts_ptr + row, mask=inside, other=0)
        decodes = tl.load(query_starts_ptr + row + 1, mask=inside, other=0) - start == 1
        first = tl.zeros([ROWS], tl.int32)
        if WINDOW > 0:
            first = tl.maximum(context - WINDOW, 0) // TILE
        if places_ptr is not None:
            place = tl.load(places_ptr + row, mask=inside, other=-1)
            group = tl.maximum(place, 0) // MEMBERS
            shared_start = tl.load(group_starts_ptr + group, mask=place >= 0, other=0)
            first = (tl.load(group_starts_ptr + group + 1, mask=place >= 0, other=0) - shared_start) // NUM_KV_HEADS
        tiles = tl.where(decodes, tl.cdiv(context, TILE) - first, 0) * NUM_KV_HEADS
        tl.store(firsts_ptr + row, first, mask=inside)
        tl.store(starts_ptr + 1 + row, before + tl.cumsum(tiles, 0), mask=inside)
        before += tl.sum(tiles, 0)


@triton.jit
def _join_pieces(
    highest, total, out, partial_ptr, lse_ptr, starts_ptr, num_rows, programs, row, kv_head, column,
    NUM_KV_HEADS: tl.constexpr, COLUMNS: tl.constexpr, HEAD_DIM: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Adds what the programs left for one column of a row (or group) and head; nothing if row is negative."""
    dim = tl.arange(0, out.shape[0])
    start = tl.load(starts_ptr + row, mask=row >= 0, other=0)
    tiles = (tl.load(starts_ptr + row + 1, mask=row >= 0, other=0) - start) // NUM_KV_HEADS
    per_program = tl.maximum(tl.cdiv(tl.load(starts_ptr + num_rows), programs), 1)
    first_tile = start + kv_head * tiles
    first_program = first_tile // per_program
    num_pieces = tl.where(tiles > 0, (first_tile + tiles - 1) // per_program - first_program + 1, 0)
    first_piece = first_program + row * NUM_KV_HEADS + kv_head
    for first in range(0, num_pieces, PIECES):
        index = first + tl.arange(0, PIECES)
        piece = (first_piece + index).to(tl.int64) * COLUMNS + column
        lse = tl.load(lse_ptr + piece, mask=index < num_pieces, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(lse, axis=0))
        weight = tl.exp2(lse - higher)
        shrink = tl.exp2(highest - higher)
        written = (index < num_pieces)[:, None] & (dim[None, :] < HEAD_DIM)
        part = tl.load(partial_ptr + piece[:, None] * HEAD_DIM + dim[None, :], mask=written, other=0.0)
        out = out * shrink + tl.sum(part * weight[:, None], axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        highest = higher
    return highest, total, out


@triton.jit(do_not_specialize=["num_rows", "num_groups", "programs", "shared_programs"])
def reduce_kernel(
    partial_ptr,  # [pieces, GROUP, D] float32
    lse_ptr,  # [pieces, GROUP] float32
    starts_ptr,  # [S + 1] int32
    shared_partial_ptr,  # [pieces, MEMBERS * GROUP, D] float32
    shared_lse_ptr,
    group_starts_ptr,  # [groups + 1] int32
    places_ptr,  # [S] int32, group * MEMBERS + member or -1; None where nobody shares
    sinks_ptr,  # [H] float32; None for no sinks
    query_starts_ptr,  # [S + 1] int32
    out_ptr,  # [T, H, D] contiguous
    num_rows,
    num_groups,
    programs,
    shared_programs,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PIECES: tl.constexpr,  # power of two, pieces per iteration
):
    """One program per (row, head): joins what is there for it. Rows that do not decode have nothing."""
    row, head = tl.program_id(0), tl.program_id(1)
    begin()
    if tl.load(starts_ptr + row) == tl.load(starts_ptr + row + 1):
        return
    kv_head, column = head // GROUP, head % GROUP
    dim = tl.arange(0, HEAD_PADDED)
    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    out = tl.zeros([HEAD_PADDED], tl.float32)
    highest, total, out = _join_pieces(
        highest, total, out, partial_ptr, lse_ptr, starts_ptr, num_rows, programs, row, kv_head, column,
        NUM_KV_HEADS, GROUP, HEAD_DIM, PIECES,
    )  # fmt: skip
    if places_ptr is not None:
        place = tl.load(places_ptr + row)
        highest, total, out = _join_pieces(
            highest, total, out, shared_partial_ptr, shared_lse_ptr, group_starts_ptr, num_groups, shared_programs,
            tl.where(place < 0, -1, place // MEMBERS), kv_head, place % MEMBERS * GROUP + column,
            NUM_KV_HEADS, MEMBERS * GROUP, HEAD_DIM, PIECES,
        )  # fmt: skip
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head) * 1.4426950408889634
        higher = tl.maximum(highest, sink)
        out *= tl.exp2(highest - higher)
        total = total * tl.exp2(highest - higher) + tl.exp2(sink - higher)
    token = tl.load(query_starts_ptr + row).to(tl.int64)
    at = out_ptr + (token * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM + dim
    tl.store(at, (out / total).to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def plan(arrays: StepArrays, scratch: DecodeScratch, num_kv_heads: int) -> None:
    """Lays out the decodes of a step, for all layers: once per step, before the first `decode`."""
    if not arrays.has_decodes:
        return
    num_rows = arrays.context_lens.numel()
    assert num_rows <= scratch.rows_max, f"{num_rows} rows in scratch for {scratch.rows_max}"
    for index, window in enumerate(scratch.windows):
        shared = shared_prefixes(arrays, window)
        plan_kernel[(1,)](
            arrays.context_lens, arrays.query_starts, shared and shared.places, shared and shared.starts,
            scratch.starts[index], scratch.firsts[index], num_rows,
            NUM_KV_HEADS=num_kv_heads, MEMBERS=shared.members.shape[1] if shared else 1, WINDOW=window or 0,
            TILE=launch.DECODE_TILE, ROWS=launch.PLAN_ROWS, **launch.COMMON_OPTIONS,
        )  # fmt: skip


def shared_prefixes(arrays: StepArrays, window: int | None) -> Prefixes | None:
    """A window may end within a prefix, and not for all rows in the same place: such layers read it row by row."""
    prefixes = arrays.prefixes
    return None if window is not None or prefixes is None or prefixes.members.numel() == 0 else prefixes


def join(
    query: torch.Tensor, arrays: StepArrays, scratch: DecodeScratch, layer: LayerAttention, out: torch.Tensor
) -> None:
    """Joins what the programs of one layer left: query and out [T, H, D], out contiguous."""
    num_heads, head_dim = query.shape[1:]
    group, num_rows = scratch.own.lse.shape[1], arrays.context_lens.numel()
    shared = shared_prefixes(arrays, layer.window)
    partials = scratch.shared if shared is not None else None
    num_kv_heads = num_heads // group
    pieces, options = launch.reduce_tile(scratch.programs, num_rows * num_kv_heads)
    reduce_kernel[(num_rows, num_heads)](
        scratch.own.out, scratch.own.lse, scratch.starts_of(layer.window),
        partials and partials.out, partials and partials.lse, shared and shared.starts, shared and shared.places,
        layer.sinks, arrays.query_starts, out, num_rows, shared.members.shape[0] if shared else 0,
        scratch.programs, scratch.shared_programs,
        NUM_KV_HEADS=num_kv_heads, GROUP=group,
        MEMBERS=shared.members.shape[1] if shared else 1, HEAD_DIM=head_dim,
        HEAD_PADDED=launch.padded(head_dim), PIECES=pieces, **options, **overlapping(query.shape[0]),
    )  # fmt: skip
