"""Attention by a CPU's bfloat16 tiles against the reference; skipped where there are none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.native.backend import NativeBackend
from coppice_worker.kernels.native.build import BuildError
from coppice_worker.kernels.native.library import load, load_tile_attention
from tests.kernels.cases import Case, attend, expected, make_case, reference_of
from tests.kernels.native.test_native import BFLOAT16_EPS, features, forget_what_no_query_sees, mixed_case, narrowed

pytestmark = pytest.mark.usefixtures("two_threads")
TILE_GEOMETRIES = [(14, 2, 64, 16), (28, 4, 128, 16), (8, 8, 96, 32), (6, 1, 32, 48), (6, 1, 80, 64), (4, 2, 256, 32)]


def by_tiles(case: Case) -> NativeBackend:
    try:
        attend_by_tiles = load_tile_attention(case.pool.shape.head_dim)
    except BuildError as error:
        pytest.skip(f"no tiles here: {error}")
    return NativeBackend(case.pool, case.heads, load(torch.bfloat16, case.pool.shape.head_dim), attend_by_tiles)


@pytest.mark.parametrize("geometry", TILE_GEOMETRIES)
@pytest.mark.parametrize("seed", range(2))
def test_random_mixes_by_tiles(geometry: tuple[int, int, int, int], seed: int) -> None:
    case = narrowed(mixed_case(geometry, seed))
    out = attend(by_tiles(case), case)
    # Weights have 16 bits; then the result is rounded.
    torch.testing.assert_close(out.double(), expected(case), atol=3e-5, rtol=BFLOAT16_EPS / 2 * 1.01)


@pytest.mark.parametrize("geometry", [(14, 2, 64, 16), (6, 1, 80, 64)])
@pytest.mark.parametrize("index", range(5))
def test_features_by_tiles(geometry: tuple[int, int, int, int], index: int) -> None:
    case = narrowed(mixed_case(geometry, index, features(geometry[0], geometry[2])[index]))
    out = attend(by_tiles(case), case)
    torch.testing.assert_close(out.double(), expected(case), atol=3e-5, rtol=BFLOAT16_EPS / 2 * 1.01)


def test_in_tiles_what_is_before_the_window_is_not_looked_at() -> None:
    case = narrowed(mixed_case((4, 2, 64, 48), 1, LayerAttention(0.1, window=29)))
    forget_what_no_query_sees(case)
    out = attend(by_tiles(case), case)
    torch.testing.assert_close(out.double(), reference_of(case), atol=3e-5, rtol=BFLOAT16_EPS / 2 * 1.01)


def test_large_scores_do_not_overflow_in_tiles() -> None:
    case = make_case([1, 50], [200, 40], block_size=16, num_kv_heads=2, group=4, head_dim=64)
    case.query.mul_(200.0)
    case = narrowed(case)
    out = attend(by_tiles(case), case)
    torch.testing.assert_close(out.double(), expected(case), atol=1e-3, rtol=BFLOAT16_EPS)


@pytest.mark.parametrize("window", [None, 21])
def test_in_tiles_a_row_does_not_depend_on_threads_or_chunks(window: int | None) -> None:
    layer = LayerAttention(0.125, window=window)
    case = narrowed(make_case([70, 1], [0, 90], block_size=16, num_kv_heads=2, group=4, head_dim=64, layer=layer))
    whole = attend(by_tiles(case), case)
    torch.set_num_threads(1)
    assert torch.equal(whole, attend(by_tiles(case), case))
    last = replace(
        case.batch, slots=case.batch.slots[37:], query_starts=np.array([0, 33, 34], np.int32),
        positions=case.batch.positions[37:], token_ids=case.batch.token_ids[37:],
    )  # fmt: skip
    alone = replace(case, batch=last, qkv=case.qkv[37:])
    assert torch.equal(whole[37:], attend(by_tiles(case), alone))
