"""The plain torch attention against the reference; unowned memory holds NaN, so reading any of it shows."""

from __future__ import annotations

import numpy as np
import pytest

from coppice_worker.kernels import torch_backend
from coppice_worker.kernels.torch_backend import TorchBackend
from tests.kernels.cases import assert_exact, make_case

GEOMETRIES = [(1, 16, 64), (2, 32, 64), (4, 16, 128), (7, 64, 16), (3, 16, 24)]  # group, block size, head size


@pytest.mark.parametrize(("group", "block_size", "head_dim"), GEOMETRIES)
@pytest.mark.parametrize("seed", range(3))
def test_random_mixes(group: int, block_size: int, head_dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    new_tokens = rng.choice([1, 1, 1, 2, 15, 16, 17, 64, 300], 9)
    before = rng.choice([0, 1, 15, 16, 31, 32, 200, 700], 9)
    case = make_case(
        new_tokens.tolist(), before.tolist(), block_size=block_size, num_kv_heads=2, group=group, head_dim=head_dim
    )
    assert_exact(TorchBackend(case.pool, case.heads), case)


def test_one_backend_serves_steps_of_all_sizes() -> None:
    """Buffers and masks grow and are reused by smaller steps."""
    sizes = [([1] * 3, [5, 6, 40]), ([400], [100]), ([1] * 5, [1, 600, 33, 32, 31]), ([2, 1], [0, 0])]
    backend = None
    for new_tokens, before in sizes:
        case = make_case(new_tokens, before, block_size=16, num_kv_heads=2, group=2, head_dim=16)
        fresh = TorchBackend(case.pool, case.heads)
        if backend is not None:
            fresh._buffers, fresh._causal = backend._buffers, backend._causal
        assert_exact(fresh, case)
        backend = fresh


def test_decode_groups_cover_all_rows_and_bound_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = np.random.default_rng(0).integers(1, 3000, 50)
    case = make_case([1] * 50, [int(n) for n in lens], block_size=64, num_kv_heads=1, group=1, head_dim=2)
    monkeypatch.setattr(torch_backend, "_GROUP_TOKENS_MAX", 20_000)
    groups = torch_backend._group_by_length(case.batch, np.arange(50), 64)
    assert sorted(np.concatenate(groups).tolist()) == list(range(50))
    assert len(groups) < 25
    for group in groups:
        blocks = -(-case.batch.context_lens[group] // 64)
        assert len(group) * int(blocks.max()) * 64 <= 20_000
        assert 1 - blocks.sum() / (len(group) * blocks.max()) <= torch_backend._GROUP_WASTE_MAX
    assert_exact(TorchBackend(case.pool, case.heads), case)
