"""How work is cut up before a launch, checked without launching anything."""

from __future__ import annotations

import numpy as np
import pytest

from coppice_worker.kernels.triton import launch

SMS = 132


def waste(context_lens: list[int], num_kv_heads: int) -> float:
    """Time of the waves over the time of perfectly even work, minus 1."""
    lens = np.array(context_lens, dtype=np.int32)
    tokens = launch.split_tokens(lens, num_kv_heads, SMS)
    assert tokens % launch.DECODE_TILE == 0
    slots = SMS * launch.DECODE_PROGRAMS_PER_SM
    programs = num_kv_heads * int((-(-lens // tokens)).sum())
    return -(-programs // slots) * tokens / (int(lens.sum()) * num_kv_heads / slots) - 1


@pytest.mark.parametrize(
    ("context_lens", "limit"),
    [([4096] * 64, 0.10), ([4096] * 8, 0.10), ([32768], 0.10), ([128 * 2**i for i in range(9)] * 4, 0.20)],
    ids=["B64x4k", "B8x4k", "B1x32k", "ragged"],
)
def test_splits_fill_the_device(context_lens: list[int], limit: float) -> None:
    assert waste(context_lens, 8) < limit


def test_short_rows_are_not_split() -> None:
    assert launch.split_tokens(np.array([1, 20], np.int32), 8, SMS) == launch.DECODE_TILE
    assert launch.split_tokens(np.empty(0, np.int32), 8, SMS) == launch.DECODE_TILE


def test_extend_tiles_cover_each_row_once() -> None:
    rows, lens = np.array([5, 0, 9], np.int32), np.array([300, 1, 1024], np.int32)
    tile_rows, tile_starts = launch.extend_tiles(rows, lens)
    for row, length in zip(rows, lens, strict=True):
        starts = tile_starts[tile_rows == row]
        assert sorted(starts.tolist()) == list(range(0, int(length), launch.EXTEND_ROWS))
        assert starts.tolist() == sorted(starts.tolist(), reverse=True)
    assert tile_rows[0] == 9
