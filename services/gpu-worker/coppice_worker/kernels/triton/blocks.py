"""Kernels that move whole blocks as bits: within the pool, to zero, and to and from a staging buffer.

A block of one plane is a run of 32-bit words. Every thread moves 16 bytes at a time, four times per program: with the
programs that a multiprocessor holds, that keeps enough bytes on their way to fill the memory's bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coppice_worker.kernels.triton import launch

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803  (compile-time constants are upper case, as everywhere in Triton)


@triton.jit
def move_blocks_kernel(
    src_ptr,  # words of plane p, block b: from p * src_plane + b * src_block on
    dst_ptr,
    src_ids_ptr,  # [N] int32; None: blocks 0 to N
    dst_ids_ptr,
    src_plane,
    src_block,
    dst_plane,
    dst_block,
    width,  # words of a block of one plane
    TILES: tl.constexpr,  # of a block of one plane
    TILE: tl.constexpr,  # words
):
    """One program per (tile of a block, plane); the tiles of a block follow each other."""
    index = tl.program_id(0) // TILES
    src = index.to(tl.int64) if src_ids_ptr is None else tl.load(src_ids_ptr + index).to(tl.int64)
    dst = index.to(tl.int64) if dst_ids_ptr is None else tl.load(dst_ids_ptr + index).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    content = tl.load(src_ptr + plane * src_plane + src * src_block + word, mask=word < width)
    tl.store(dst_ptr + plane * dst_plane + dst * dst_block + word, content, mask=word < width)


@triton.jit
def zero_blocks_kernel(
    planes_ptr,  # [planes, num_blocks, width] int32
    block_ids_ptr,  # [N] int32
    num_blocks,
    width,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per (tile of a block, plane)."""
    block = tl.load(block_ids_ptr + tl.program_id(0) // TILES)
    word = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    first = (tl.program_id(1).to(tl.int64) * num_blocks + block) * width
    tl.store(planes_ptr + first + word, tl.zeros([TILE], tl.int32), mask=word < width)


def copy_blocks(planes: tuple[torch.Tensor, ...], src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copies blocks src [N] to dst [N] int32 in all planes (`KvPool.planes`)."""
    for plane in planes:
        _move(plane, plane, src, dst, src.numel())


def gather_blocks(planes: tuple[torch.Tensor, ...], ids: torch.Tensor, staged: tuple[torch.Tensor, ...]) -> None:
    """Copies blocks ids [N] int32 of all planes into `KvPool.staged`."""
    for plane, part in zip(planes, staged, strict=True):
        _move(plane, part, ids, None, ids.numel())


def scatter_blocks(staged: tuple[torch.Tensor, ...], ids: torch.Tensor, planes: tuple[torch.Tensor, ...]) -> None:
    """Copies `KvPool.staged` into blocks ids [N] int32 of all planes."""
    for plane, part in zip(planes, staged, strict=True):
        _move(part, plane, None, ids, ids.numel())


def zero_blocks(planes: tuple[torch.Tensor, ...], block_ids: torch.Tensor) -> None:
    """Overwrites blocks [N] int32 in all planes (`KvPool.planes`) with zeros."""
    for plane in planes:
        num_planes, num_blocks, width = plane.shape
        tiles, tile, options = launch.copy_tiles(width)
        zero_blocks_kernel[(block_ids.numel() * tiles, num_planes)](
            plane, block_ids, num_blocks, width, TILES=tiles, TILE=tile, **options
        )


def _move(
    src: torch.Tensor, dst: torch.Tensor, src_ids: torch.Tensor | None, dst_ids: torch.Tensor | None, count: int
) -> None:
    """Moves `count` blocks between src and dst, both [planes, blocks, width] int32 with contiguous blocks."""
    num_planes, _, width = src.shape
    tiles, tile, options = launch.copy_tiles(width)
    move_blocks_kernel[(count * tiles, num_planes)](
        src, dst, src_ids, dst_ids, src.stride(0), src.stride(1), dst.stride(0), dst.stride(1), width,
        TILES=tiles, TILE=tile, **options,
    )  # fmt: skip
