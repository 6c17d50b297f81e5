"""How work is cut up before a launch, checked without launching anything."""

from __future__ import annotations

import numpy as np

from coppice_worker.kernels.triton.extend_launch import EXTEND_ROWS, extend_tiles


def test_extend_tiles_cover_each_row_once() -> None:
    rows, lens = np.array([5, 0, 9], np.int32), np.array([300, 1, 1024], np.int32)
    tile_rows, tile_starts = extend_tiles(rows, lens)
    for row, length in zip(rows, lens, strict=True):
        starts = tile_starts[tile_rows == row]
        assert sorted(starts.tolist()) == list(range(0, int(length), EXTEND_ROWS))
        assert starts.tolist() == sorted(starts.tolist(), reverse=True)
    assert tile_rows[0] == 9
