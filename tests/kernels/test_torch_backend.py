"""The plain torch attention against the reference; unowned memory holds NaN, so reading any of it shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coppice_worker.kernels import torch_backend
from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.torch_backend import TorchBackend
from tests.kernels.cases import Case, assert_exact, attend, expected, make_case

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


FEATURES = {
    "window": {"window": 20},
    "window-of-one": {"window": 1},
    "window-of-everything": {"window": 5000},
    "cap": {"soft_cap": 1.5},
    "sinks": {"sinks": torch.linspace(-3, 3, 8)},
    "all": {"window": 36, "soft_cap": 2.0, "sinks": torch.linspace(-3, 3, 8)},
}


def featured_case(feature: str, **geometry: int) -> Case:
    return make_case(
        [1, 1, 1, 1, 2, 17, 64, 300, 600],
        [0, 15, 36, 700, 31, 32, 200, 150, 0],
        layer=LayerAttention(scale=1.5 * geometry["head_dim"] ** -0.5, **FEATURES[feature]),  # type: ignore[arg-type]
        **geometry,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(
    "geometry",
    [
        {"block_size": 16, "num_kv_heads": 2, "group": 4, "head_dim": 16},
        {"block_size": 64, "num_kv_heads": 8, "group": 1, "head_dim": 24},
        {"block_size": 32, "num_kv_heads": 1, "group": 8, "head_dim": 80},
    ],
)
def test_windows_caps_and_sinks(feature: str, geometry: dict[str, int]) -> None:
    case = featured_case(feature, **geometry)
    assert_exact(TorchBackend(case.pool, case.heads), case)


def test_scores_near_a_cap_count_as_capped() -> None:
    case = featured_case("all", block_size=16, num_kv_heads=2, group=4, head_dim=16)
    case.query.mul_(30.0)
    assert_exact(TorchBackend(case.pool, case.heads), case)


def test_blocks_before_the_window_are_not_touched() -> None:
    """Their places in the tables name blocks that do not exist; what the window hides of the others is NaN."""
    case = featured_case("window", block_size=16, num_kv_heads=2, group=4, head_dim=16)
    batch, window, block_size = case.batch, 20, 16
    backend = TorchBackend(case.pool, case.heads)
    attend(backend, case)
    wanted = expected(case)
    firsts = np.maximum(0, batch.context_lens - np.diff(batch.query_starts) - (window - 1))
    tables = batch.block_tables.copy()
    for row, first in enumerate(firsts):
        tables[row, : first // block_size] = 1 << 20
        block, hidden = batch.block_tables[row, first // block_size], first % block_size
        case.pool.storage[:, :, block, :, :hidden] = float("nan")
    out = attend(backend, replace(case, batch=replace(batch, block_tables=tables)))
    torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=1e-5)
    assert (tables == 1 << 20).sum() > 50
