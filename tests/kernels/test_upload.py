"""Arrays that travel in one copy arrive as they were, and nobody's memory is used twice while it is in use."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coppice_worker.kernels.upload import Upload

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_what_is_sent_arrives(device: str) -> None:
    upload, rng = Upload(torch.device(device)), np.random.default_rng(0)
    sent, arrived = [], []
    for size in (3, 1, 900, 0, 17):  # buffers grow, and are used again
        sent += [
            rng.integers(0, 1 << 40, size),
            rng.integers(0, 1 << 20, (size, 5)).astype(np.int32)[:, ::2],
            rng.random(size).astype(np.float32),
        ]
        arrived += upload.send(sent[-3:])
    for array, tensor in zip(sent, arrived, strict=True):
        assert tensor.is_contiguous()
        assert np.array_equal(tensor.cpu().numpy(), array)
        assert tensor.cpu().numpy().dtype == array.dtype
        assert tensor.data_ptr() % 16 == 0, "kernels are compiled for that"
