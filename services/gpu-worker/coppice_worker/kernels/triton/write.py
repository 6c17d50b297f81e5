"""One launch between a layer's projection and its attention: head norms, rotation, quantisation, slots.

    a token's row of qkv   | q heads | k heads | v heads |       a program: up to HEADS of them, of one kind
    q                      norm, rotate, back in place
    k                      norm, rotate, into its slot           each half of a head is a tile [HEADS, D / 2]
    v                      into its slot

All of it is computed in float32 and rounded once, where it is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coppice_worker.kernels.backend import Angles, LayerAttention
from coppice_worker.kernels.pool import FLOAT8_MAX, SCALE_MIN, LayerBlocks
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.overlap import begin, overlapping

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)


@triton.jit
def _norm(first, second, weight_ptr, column, inside, eps, HALF: tl.constexpr):
    """RMS norm of each head [HEADS, 2 * HALF], given and returned as halves; beyond `inside` they are 0."""
    square = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
    scale = tl.rsqrt(square + eps)[:, None]
    first = first * scale * tl.load(weight_ptr + column, mask=inside, other=0.0)[None, :]
    second = second * scale * tl.load(weight_ptr + HALF + column, mask=inside, other=0.0)[None, :]
    return first, second


@triton.jit
def _store(pool_ptr, scales_ptr, rows, first, second, column, mask, wanted, HALF, FLOAT8_MAX, SCALE_MIN):
    """Heads, as halves, into rows of the pool [num_blocks * HK * BLOCK_SIZE, D]."""
    if scales_ptr is not None:
        largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        scale = tl.maximum(tl.div_rn(largest, FLOAT8_MAX), SCALE_MIN)
        inverse = tl.div_rn(1.0, scale)[:, None]
        first, second = first * inverse, second * inverse
        tl.store(scales_ptr + rows, scale, mask=wanted)
    at = pool_ptr + (rows * (2 * HALF))[:, None] + column[None, :]
    tl.store(at, first.to(pool_ptr.dtype.element_ty), mask=mask)
    tl.store(at + HALF, second.to(pool_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_kernel(
    qkv_ptr,  # [T, H + 2 HK, D], token rows `qkv_stride` elements apart; queries are rotated in place
    cos_ptr,  # [T, D / 2]
    sin_ptr,
    slots_ptr,  # [T] int64, block id * BLOCK_SIZE + offset; negative: the token is padding
    query_norm_ptr,  # [D] float32, or None: no norms
    key_norm_ptr,
    key_pool_ptr,  # [num_blocks, HK, BLOCK_SIZE, D]
    value_pool_ptr,
    key_scales_ptr,  # [num_blocks, HK, BLOCK_SIZE] float32, or None: the pool holds what it is given
    value_scales_ptr,
    qkv_stride,
    eps,
    FLOAT8_MAX: tl.constexpr,
    SCALE_MIN: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    HALF_PADDED: tl.constexpr,  # power of two >= HALF
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_parts = (NUM_HEADS + HEADS - 1) // HEADS
    kv_parts = (NUM_KV_HEADS + HEADS - 1) // HEADS
    begin()
    slot = tl.load(slots_ptr + token)
    column = tl.arange(0, HALF_PADDED)
    inside = column < HALF
    is_query, is_value = part < query_parts, part >= query_parts + kv_parts
    of_kind = part if is_query else (part - query_parts) % kv_parts
    head = of_kind * HEADS + tl.arange(0, HEADS)
    before = 0 if is_query else (NUM_HEADS + NUM_KV_HEADS if is_value else NUM_HEADS)
    count = NUM_HEADS if is_query else NUM_KV_HEADS
    at = qkv_ptr + token * qkv_stride + ((before + head) * (2 * HALF))[:, None] + column[None, :]
    mask = (head < count)[:, None] & inside[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    # The loads above wait for no slot: only what is stored depends on it.
    wanted = head < tl.where(slot >= 0, count, 0)
    mask = wanted[:, None] & inside[None, :]
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    rows = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + offset
    if is_value:
        _store(value_pool_ptr, value_scales_ptr, rows, first, second, column, mask, wanted, HALF, FLOAT8_MAX, SCALE_MIN)
    else:
        if query_norm_ptr is not None:
            weight = query_norm_ptr if is_query else key_norm_ptr
            first, second = _norm(first, second, weight, column, inside, eps, HALF)
        cos = tl.load(cos_ptr + token * HALF + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + token * HALF + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        first, second = first * cos - second * sin, second * cos + first * sin
        if is_query:
            tl.store(at, first.to(qkv_ptr.dtype.element_ty), mask=mask)
            tl.store(at + HALF, second.to(qkv_ptr.dtype.element_ty), mask=mask)
        else:
            _store(key_pool_ptr, key_scales_ptr, rows, first, second, column, mask, wanted, HALF, FLOAT8_MAX, SCALE_MIN)


def write(
    qkv: torch.Tensor, angles: Angles, slots: torch.Tensor, blocks: LayerBlocks, layer: LayerAttention, num_heads: int
) -> torch.Tensor:
    """Norms and rotates the heads of qkv [T, H + 2 HK, D] and puts keys and values into slots [T] int64.

    Tokens may be strided, heads are contiguous. Tokens of a negative slot are padding: nothing is written for them.
    Returns the queries [T, H, D], which are qkv's own memory.
    """
    cos, sin = angles
    assert qkv.stride()[1:] == (qkv.shape[2], 1)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    num_kv_heads, block_size, head_dim = blocks.keys.shape[1:]
    norms = layer.head_norms
    half, heads, options = launch.write_tile(head_dim)
    parts = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
    write_kernel[(qkv.shape[0], parts)](
        qkv, cos, sin, slots, norms and norms.query, norms and norms.key,
        blocks.keys, blocks.values, blocks.key_scales, blocks.value_scales, qkv.stride(0), norms.eps if norms else 0.0,
        FLOAT8_MAX=FLOAT8_MAX, SCALE_MIN=SCALE_MIN, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2, HALF_PADDED=half, BLOCK_SIZE=block_size, HEADS=heads,
        **options, **overlapping(qkv.shape[0]),
    )  # fmt: skip
    return qkv[:, :num_heads]
