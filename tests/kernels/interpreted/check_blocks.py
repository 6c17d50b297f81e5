"""Copying, zeroing, gathering and scattering blocks: the named blocks change, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coppice_worker.kernels.backend import Heads, LayerAttention
from coppice_worker.kernels.pool import KvPool, KvShape
from coppice_worker.kernels.torch_backend import TorchBackend
from coppice_worker.kernels.triton.backend import TritonBackend

BACKENDS = [TritonBackend, TorchBackend]
DTYPES = [torch.float32, torch.float8_e4m3fn]
HEADS = Heads(3, (LayerAttention(scale=1.0),) * 2)

pytestmark = [pytest.mark.parametrize("backend", BACKENDS), pytest.mark.parametrize("dtype", DTYPES)]
Kind = type[TritonBackend] | type[TorchBackend]


def random_pool(dtype: torch.dtype) -> KvPool:
    """Blocks of 3 * 16 * 56 = 2688 float32: one whole tile and a part of another. All bits are random, NaN too."""
    pool = KvPool(KvShape(2, 3, 56), num_blocks=7, block_size=16, device=torch.device("cpu"), dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for plane in pool.planes():
        plane.copy_(torch.randint(-(2**31), 2**31, plane.shape, generator=generator, dtype=torch.int64))
    return pool


def bits(pool: KvPool) -> list[torch.Tensor]:
    return [plane.clone() for plane in pool.planes()]


def assert_bits(pool: KvPool, wanted: list[torch.Tensor]) -> None:
    assert all(torch.equal(got, want) for got, want in zip(pool.planes(), wanted, strict=True))
    assert len(wanted) == (1 if pool.scales is None else 2)


def test_copy(backend: Kind, dtype: torch.dtype) -> None:
    pool = random_pool(dtype)
    wanted = bits(pool)
    backend(pool, HEADS).copy_blocks(np.array([6, 0, 6], np.int32), np.array([1, 3, 2], np.int32))
    for plane in wanted:
        plane[:, [1, 3, 2]] = plane[:, [6, 0, 6]]
    assert_bits(pool, wanted)


def test_zero(backend: Kind, dtype: torch.dtype) -> None:
    pool = random_pool(dtype)
    wanted = bits(pool)
    backend(pool, HEADS).zero_blocks(np.array([5, 0], np.int32))
    for plane in wanted:
        plane[:, [5, 0]] = 0
    assert_bits(pool, wanted)


def test_gather_and_scatter(backend: Kind, dtype: torch.dtype) -> None:
    """Out of one pool and into another one: the staging buffer holds whole blocks and nothing else."""
    pool, other = random_pool(dtype), random_pool(dtype)
    for plane in other.planes():
        plane.neg_()
    wanted, before = bits(other), bits(pool)
    staging = torch.full((4, pool.bytes_per_block), 7, dtype=torch.uint8)
    backend(pool, HEADS).gather_blocks(np.array([6, 2, 3], np.int32), staging[:3])
    backend(other, HEADS).scatter_blocks(staging[:3], np.array([0, 4, 1], np.int32))
    for plane, source in zip(wanted, before, strict=True):
        plane[:, [0, 4, 1]] = source[:, [6, 2, 3]]
    assert_bits(pool, before)
    assert_bits(other, wanted)
    assert (staging[3] == 7).all()
    # A row begins with layer 0's keys of its block.
    assert torch.equal(staging[1].view(torch.int32)[: before[0].shape[2]], before[0][0, 2])


@pytest.mark.parametrize(("src", "dst"), [([0, 1], [1, 2]), ([0, 1], [2, 2])])
def test_copies_without_a_defined_result_are_refused(
    backend: Kind, dtype: torch.dtype, src: list[int], dst: list[int]
) -> None:
    pool = random_pool(dtype)
    wanted = bits(pool)
    with pytest.raises(ValueError, match="split the copies"):
        backend(pool, HEADS).copy_blocks(np.array(src, np.int32), np.array(dst, np.int32))
    assert_bits(pool, wanted)
