"""Copying, zeroing and writing blocks: the named blocks change, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coppice_worker.kernels.backend import Heads, LayerAttention
from coppice_worker.kernels.pool import KvPool, KvShape
from coppice_worker.kernels.torch_backend import TorchBackend
from coppice_worker.kernels.triton.backend import TritonBackend

BACKENDS = [TritonBackend, TorchBackend]
HEADS = Heads(3, (LayerAttention(scale=1.0),) * 2)


def random_pool(head_dim: int = 24) -> KvPool:
    """Blocks of 3 * 16 * 24 = 1152 elements: one whole copy tile and a part of another."""
    pool = KvPool(KvShape(2, 3, head_dim), num_blocks=7, block_size=16, device=torch.device("cpu"), dtype=torch.float32)
    pool.storage.copy_(torch.randn(pool.storage.shape, generator=torch.Generator().manual_seed(1)))
    return pool


@pytest.mark.parametrize("backend", BACKENDS)
def test_copy(backend: type[TritonBackend] | type[TorchBackend]) -> None:
    pool = random_pool()
    before = pool.storage.clone()
    backend(pool, HEADS).copy_blocks(np.array([6, 0, 6], np.int32), np.array([1, 3, 2], np.int32))
    wanted = before.clone()
    wanted[:, :, [1, 3, 2]] = before[:, :, [6, 0, 6]]
    assert torch.equal(pool.storage, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero(backend: type[TritonBackend] | type[TorchBackend]) -> None:
    pool = random_pool()
    wanted = pool.storage.clone()
    wanted[:, :, [5, 0]] = 0
    backend(pool, HEADS).zero_blocks(np.array([5, 0], np.int32))
    assert torch.equal(pool.storage, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("src", "dst"), [([0, 1], [1, 2]), ([0, 1], [2, 2])])
def test_copies_without_a_defined_result_are_refused(
    backend: type[TritonBackend] | type[TorchBackend], src: list[int], dst: list[int]
) -> None:
    pool = random_pool()
    before = pool.storage.clone()
    with pytest.raises(ValueError, match="split the copies"):
        backend(pool, HEADS).copy_blocks(np.array(src, np.int32), np.array(dst, np.int32))
    assert torch.equal(pool.storage, before)
