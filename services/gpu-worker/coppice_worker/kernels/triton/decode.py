"""Paged attention for rows with one new token, split along the context.

    context of a row    |---- split 0 ----|---- split 1 ----|-- split 2 --|     one program per (row, KV head, split)
    partial results        out, log-sum-exp    out, lse         out, lse        float32
    reduce                 out = sum(out_i * exp(lse_i - lse)), lse = log(sum(exp(lse_i)))

The G query heads of a KV head share each loaded tile. Operands are swapped: scores are K q^T [tokens, G] and the
output is V^T p [D, G], so that the long sides (tokens, D) fill the matrix unit's 64 rows and the few query heads are
its narrow side. Split-KV with log-sum-exp: Dao et al. 2023 (Flash-Decoding).
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


# Values that change from step to step must not each compile a kernel of their own.
@triton.jit(do_not_specialize=["table_width", "num_splits"])
def decode_kernel(
    query_ptr,  # [T, H, D], token rows `query_stride` elements apart
    key_pool_ptr,  # [num_blocks, HK, BLOCK_SIZE, D]
    value_pool_ptr,
    tables_ptr,  # [S, table_width] int32
    context_lens_ptr,  # [S] int32
    rows_ptr,  # [B] int32, the sequence rows that decode
    tokens_ptr,  # [B] int32, their token among the packed ones
    partial_ptr,  # [B, H, num_splits, D] float32
    lse_ptr,  # [B, H, num_splits] float32, natural logarithm
    query_stride,
    table_width,
    num_splits,
    split_tokens,  # context tokens per split, a multiple of TILE
    scale_log2,  # softmax scale * log2(e)
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    GROUP_PADDED: tl.constexpr,  # power of two >= max(GROUP, 16)
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,  # power of two >= HEAD_DIM
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,  # context tokens per iteration
):
    index, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows_ptr + index)
    context = tl.load(context_lens_ptr + row)
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, context)
    group, column = tl.arange(0, GROUP_PADDED), tl.arange(0, HEAD_PADDED)
    real = group < GROUP
    head = kv_head * GROUP + group
    out_row = (index.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * num_splits + split
    if start >= context:
        tl.store(lse_ptr + out_row, tl.full([GROUP_PADDED], float("-inf"), tl.float32), mask=real)
        return
    token = tl.load(tokens_ptr + index).to(tl.int64)
    query_at = token * query_stride + head[None, :] * HEAD_DIM + column[:, None]
    query = tl.load(query_ptr + query_at, mask=real[None, :] & (column[:, None] < HEAD_DIM), other=0.0)  # [D, G]
    highest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    out = tl.zeros([HEAD_PADDED, GROUP_PADDED], tl.float32)
    table = tables_ptr + row.to(tl.int64) * table_width
    for first in range(start, end, TILE):
        position = first + tl.arange(0, TILE)
        inside = position < end
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        kv_row = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
        kv_at = kv_row[:, None] + column[None, :]
        kv_mask = inside[:, None] & (column[None, :] < HEAD_DIM)
        key = tl.load(key_pool_ptr + kv_at, mask=kv_mask, other=0.0)
        score = tl.dot(key, query, input_precision="ieee") * scale_log2  # [TILE, G], in powers of two
        score = tl.where(inside[:, None], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=0))
        weight = tl.exp2(score - higher[None, :])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weight, axis=0)
        value = tl.load(value_pool_ptr + kv_at, mask=kv_mask, other=0.0)
        out = out * shrink[None, :]
        out = tl.dot(tl.trans(value), weight.to(value.dtype), out, input_precision="ieee")
        highest = higher
    out = out / total[None, :]
    out_at = out_row[None, :] * HEAD_DIM + column[:, None]
    tl.store(partial_ptr + out_at, out, mask=real[None, :] & (column[:, None] < HEAD_DIM))
    tl.store(lse_ptr + out_row, (highest + tl.log2(total)) * 0.6931471805599453, mask=real)


@triton.jit(do_not_specialize=["num_splits"])
def reduce_kernel(
    partial_ptr,  # [B, H, num_splits, D] float32
    lse_ptr,  # [B, H, num_splits] float32; -inf marks a split without tokens, whose partial was never written
    tokens_ptr,  # [B] int32
    out_ptr,  # [T, H, D] contiguous
    num_heads,
    num_splits,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,  # power of two, splits per iteration
):
    """One program per (row, head): joins the splits' outputs by their log-sum-exp."""
    index, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, HEAD_PADDED)
    first_row = (index.to(tl.int64) * num_heads + head) * num_splits
    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    out = tl.zeros([HEAD_PADDED], tl.float32)
    for first in range(0, num_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        lse = tl.load(lse_ptr + first_row + split, mask=split < num_splits, other=float("-inf"))
        # The first split of a row always has tokens, so `higher` is finite from the first iteration on.
        higher = tl.maximum(highest, tl.max(lse, axis=0))
        weight = tl.exp(lse - higher)
        shrink = tl.exp(highest - higher)
        written = (lse > float("-inf"))[:, None] & (column[None, :] < HEAD_DIM)
        part = tl.load(partial_ptr + (first_row + split)[:, None] * HEAD_DIM + column[None, :], mask=written, other=0.0)
        out = out * shrink + tl.sum(part * weight[:, None], axis=0)
        total = total * shrink + tl.sum(weight, axis=0)
        highest = higher
    token = tl.load(tokens_ptr + index).to(tl.int64)
    at = out_ptr + (token * num_heads + head) * HEAD_DIM + column
    tl.store(at, (out / total).to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


def decode(
    query: torch.Tensor,
    blocks: LayerBlocks,
    arrays: StepArrays,
    layer: LayerAttention,
    out: torch.Tensor,
) -> None:
    """Attends for the rows with one new token: query and out [T, H, D]."""
    keys, values = blocks.keys, blocks.values
    _, num_heads, head_dim = query.shape
    num_kv_heads, block_size = keys.shape[1:3]
    group, head_padded = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    rows = arrays.decodes
    decode_kernel[(rows.rows.numel(), num_kv_heads, rows.num_splits)](
        query, keys, values, arrays.tables, arrays.context_lens, rows.rows, rows.tokens, rows.partial, rows.lse,
        query.stride(0), arrays.tables.stride(0), rows.num_splits, rows.split_tokens, layer.scale * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, HEAD_PADDED=head_padded, BLOCK_SIZE=block_size, TILE=launch.DECODE_TILE,
        **launch.DECODE_OPTIONS,
    )  # fmt: skip
    reduce_kernel[(rows.rows.numel(), num_heads)](
        rows.partial, rows.lse, rows.tokens, out, num_heads, rows.num_splits,
        HEAD_DIM=head_dim, HEAD_PADDED=head_padded, SPLITS=launch.REDUCE_SPLITS, **launch.COMMON_OPTIONS,
    )  # fmt: skip
