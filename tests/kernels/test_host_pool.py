"""Copies between the tiers move every bit of a block, and nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch

from coppice_worker.core.batch.step_batch import Int32
from coppice_worker.kernels.backend import Heads, LayerAttention
from coppice_worker.kernels.host_pool import HostPool, StagedCopies, runs
from coppice_worker.kernels.pool import KvPool, KvShape
from coppice_worker.kernels.torch_backend import TorchBackend

SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=16)
NUM_BLOCKS, NUM_HOST_BLOCKS = 12, 7
DEVICES = [
    "cpu",
    "staged",  # as on a GPU, on the CPU
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]


class NoLanes:
    """For a device that does one thing after another."""

    count = 2

    def after_steps(self) -> None:
        """They are over."""

    def lane(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self) -> None:
        """All is done."""


class Staged(HostPool):
    def __init__(self, pool: KvPool, backend: TorchBackend, num_blocks: int) -> None:
        super().__init__(pool, backend, num_blocks)
        self._copies = StagedCopies(pool, backend, self.blocks, NoLanes())


def filled(device: str, dtype: torch.dtype) -> KvPool:
    """A pool whose bits are all different, NaNs of many kinds among them."""
    pool = KvPool(
        SHAPE, num_blocks=NUM_BLOCKS, block_size=16, device=torch.device(device.replace("staged", "cpu")), dtype=dtype
    )
    torch.manual_seed(5)
    for plane in pool.planes():
        plane.copy_(torch.randint(-(1 << 31), 1 << 31, plane.shape, dtype=torch.int32))
    return pool


def tiers(device: str, pool: KvPool, num_host_blocks: int = NUM_HOST_BLOCKS) -> HostPool:
    backend = TorchBackend(pool, Heads(4, (LayerAttention(scale=0.25),) * SHAPE.num_layers))
    return (Staged if device == "staged" else HostPool)(pool, backend, num_host_blocks)


def bits(pool: KvPool) -> list[torch.Tensor]:
    return [plane.cpu().clone() for plane in pool.planes()]


def ids(*blocks: int) -> Int32:
    return np.array(blocks, np.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_what_went_to_the_host_comes_back_to_another_place(device: str, dtype: torch.dtype) -> None:
    pool = filled(device, dtype)
    host, before = tiers(device, pool), bits(pool)
    host.demote(ids(3, 4, 9, 0), ids(6, 0, 1, 4))
    for plane in pool.planes():
        plane.fill_(-1)  # NaN in every format
    host.promote(ids(0, 6, 4), ids(11, 2, 5))
    for plane, was in zip(bits(pool), before, strict=True):
        for now, then in ((11, 4), (2, 3), (5, 0)):
            assert torch.equal(plane[:, now], was[:, then])
        others = [block for block in range(NUM_BLOCKS) if block not in (11, 2, 5)]
        assert (plane[:, others] == -1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_leaves_the_other_blocks_of_the_host(device: str) -> None:
    pool = filled(device, torch.bfloat16)
    host = tiers(device, pool)
    host.blocks.fill_(255)
    host.demote(ids(3, 8), ids(5, 2))
    assert (host.blocks[[0, 1, 3, 4, 6]] == 255).all()
    assert not (host.blocks[[2, 5]] == 255).all()


@pytest.mark.parametrize("device", DEVICES)
def test_more_blocks_than_a_buffer_holds(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = filled(device, torch.float32)
    monkeypatch.setattr("coppice_worker.kernels.host_pool._STAGING_BYTES", 2 * pool.bytes_per_block)
    host, before = tiers(device, pool, num_host_blocks=NUM_BLOCKS), bits(pool)
    every, turned = np.arange(NUM_BLOCKS, dtype=np.int32), np.arange(NUM_BLOCKS, dtype=np.int32)[::-1]
    host.demote(every, turned)
    for plane in pool.planes():
        plane.fill_(0)
    host.promote(turned, every)
    assert all(torch.equal(*pair) for pair in zip(bits(pool), before, strict=True))


def test_runs_of_consecutive_blocks() -> None:
    assert runs(ids(4, 5, 6, 2, 3, 9)) == [(4, 0, 3), (2, 3, 5), (9, 5, 6)]
    assert runs(ids(7)) == [(7, 0, 1)]
