"""Kernels that write, copy and zero blocks without computing anything."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coppice_worker.kernels.pool import LayerBlocks

from . import launch

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)


@triton.jit
def write_kv_kernel(
    key_ptr,  # [T, HK, D], token rows `key_stride` elements apart
    value_ptr,  # [T, HK, D], token rows `value_stride` elements apart
    slots_ptr,  # [T] int64, block id * BLOCK_SIZE + offset
    key_pool_ptr,  # [num_blocks, HK, BLOCK_SIZE, D]
    value_pool_ptr,
    key_stride,
    value_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= HK * D
):
    """One program per token: its K and V, all heads, go to its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    element = tl.arange(0, WIDTH)
    head, column = element // HEAD_DIM, element % HEAD_DIM
    inside = element < NUM_KV_HEADS * HEAD_DIM
    target = ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + offset) * HEAD_DIM + column
    key = tl.load(key_ptr + token * key_stride + element, mask=inside)
    tl.store(key_pool_ptr + target, key, mask=inside)
    value = tl.load(value_ptr + token * value_stride + element, mask=inside)
    tl.store(value_pool_ptr + target, value, mask=inside)


@triton.jit
def copy_blocks_kernel(
    planes_ptr,  # [planes, num_blocks, width]
    src_ptr,  # [N] int32
    dst_ptr,  # [N] int32
    num_blocks,
    width,
    TILE: tl.constexpr,
):
    """One program per (pair, tile of a block, plane)."""
    pair, tile, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    src = tl.load(src_ptr + pair).to(tl.int64)
    dst = tl.load(dst_ptr + pair).to(tl.int64)
    element = tile * TILE + tl.arange(0, TILE)
    first = plane.to(tl.int64) * num_blocks
    content = tl.load(planes_ptr + (first + src) * width + element, mask=element < width)
    tl.store(planes_ptr + (first + dst) * width + element, content, mask=element < width)


@triton.jit
def zero_blocks_kernel(
    planes_ptr,  # [planes, num_blocks, width]
    block_ids_ptr,  # [N] int32
    num_blocks,
    width,
    TILE: tl.constexpr,
):
    """One program per (block, tile of a block, plane)."""
    index, tile, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = tl.load(block_ids_ptr + index).to(tl.int64)
    element = tile * TILE + tl.arange(0, TILE)
    target = planes_ptr + (plane.to(tl.int64) * num_blocks + block) * width + element
    tl.store(target, tl.zeros([TILE], planes_ptr.dtype.element_ty), mask=element < width)


def write_kv(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, blocks: LayerBlocks) -> None:
    """Puts key and value [T, HK, D], rows perhaps strided, at slots [T]."""
    keys, values = blocks.keys, blocks.values
    tokens, heads, head_dim = key.shape
    write_kv_kernel[(tokens,)](
        key, value, slots, keys, values, key.stride(0), value.stride(0),
        NUM_KV_HEADS=heads, HEAD_DIM=head_dim, BLOCK_SIZE=keys.shape[2],
        WIDTH=triton.next_power_of_2(heads * head_dim), **launch.COMMON_OPTIONS,
    )  # fmt: skip


def copy_blocks(planes: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copies blocks src [N] to dst [N] in all planes [planes, num_blocks, width]."""
    num_planes, num_blocks, width = planes.shape
    grid = (src.numel(), triton.cdiv(width, launch.COPY_TILE), num_planes)
    copy_blocks_kernel[grid](planes, src, dst, num_blocks, width, TILE=launch.COPY_TILE, **launch.COMMON_OPTIONS)


def zero_blocks(planes: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Overwrites blocks [N] in all planes [planes, num_blocks, width] with zeros."""
    num_planes, num_blocks, width = planes.shape
    grid = (block_ids.numel(), triton.cdiv(width, launch.COPY_TILE), num_planes)
    zero_blocks_kernel[grid](planes, block_ids, num_blocks, width, TILE=launch.COPY_TILE, **launch.COMMON_OPTIONS)
