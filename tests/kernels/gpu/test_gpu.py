"""The compiled kernels on a real device, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from coppice_worker.kernels import reference
from coppice_worker.kernels.pool import KvPool
from tests.kernels.cases import Case, attend, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize(("group", "block_size", "head_dim"), [(1, 16, 64), (4, 16, 128), (7, 64, 128), (3, 32, 80)])
def test_mixed_step(dtype: torch.dtype, tolerance: float, group: int, block_size: int, head_dim: int) -> None:
    from coppice_worker.kernels.triton.backend import TritonBackend

    new_tokens, before = [1, 300, 1, 1, 17, 2], [0, 200, 1500, 63, 0, 127]
    case = make_case(new_tokens, before, block_size=block_size, num_kv_heads=2, group=group, head_dim=head_dim)
    pool = KvPool(
        case.pool.shape,
        num_blocks=case.pool.num_blocks,
        block_size=block_size,
        device=torch.device("cuda"),
        dtype=dtype,
    )
    pool.storage.copy_(case.pool.storage)
    on_device = Case(pool, case.batch, case.qkv.to("cuda", dtype), case.layer)
    query = on_device.query
    out = attend(TritonBackend(pool, on_device.heads), on_device)
    tables, lens, starts = (
        torch.from_numpy(array) for array in (case.batch.block_tables, case.batch.context_lens, case.batch.query_starts)
    )
    keys, values = pool.keys(0).cpu(), pool.values(0).cpu()
    wanted = reference.attend(case.layer, query.cpu(), keys, values, tables, lens, starts)
    torch.testing.assert_close(out.cpu().double(), wanted, atol=tolerance, rtol=tolerance)


def test_copy_and_zero() -> None:
    from coppice_worker.kernels.triton.backend import TritonBackend

    case = make_case([1], [100], block_size=16, num_kv_heads=2, group=1, head_dim=64)
    pool = KvPool(case.pool.shape, num_blocks=10, block_size=16, device=torch.device("cuda"), dtype=torch.bfloat16)
    pool.storage.normal_()
    before = pool.storage.clone()
    backend = TritonBackend(pool, case.heads)
    backend.copy_blocks(np.array([1, 2], np.int32), np.array([8, 9], np.int32))
    backend.zero_blocks(np.array([0], np.int32))
    assert torch.equal(pool.storage[:, :, 8:], before[:, :, 1:3])
    assert pool.storage[:, :, 0].abs().sum() == 0
    assert torch.equal(pool.storage[:, :, 1:8], before[:, :, 1:8])
