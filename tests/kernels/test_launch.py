"""How work is cut up before a launch, checked without launching anything."""

from __future__ import annotations

import numpy as np
import pytest

from coppice_worker.kernels.triton.attention.extend_launch import EXTEND_ROWS, cut_tiles, extend_tiles, tile_contexts


def test_extend_tiles_cover_each_row_once() -> None:
    rows, lens = np.array([5, 0, 9], np.int32), np.array([300, 1, 1024], np.int32)
    tile_rows, tile_starts = extend_tiles(rows, lens)
    for row, length in zip(rows, lens, strict=True):
        starts = tile_starts[tile_rows == row]
        assert sorted(starts.tolist()) == list(range(0, int(length), EXTEND_ROWS))
        assert starts.tolist() == sorted(starts.tolist(), reverse=True)
    assert tile_rows[0] == 9


def contexts_of(new_tokens: list[int], before: list[int], group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    new = np.array(new_tokens, np.int32)
    rows, starts = extend_tiles(np.arange(new.size, dtype=np.int32), new * group)
    return rows, starts, tile_contexts(rows, starts, new + np.array(before, np.int32), new, group)


def test_contexts_of_tiles_end_with_their_last_query() -> None:
    rows, starts, contexts = contexts_of([100, 1], [7, 9], 3)
    assert rows.tolist() == [0, 0, 0, 1]
    assert starts.tolist() == [256, 128, 0, 0]
    assert contexts.tolist() == [107, 7 + 86, 7 + 43, 10]


def last_end(lens: list[int], num_sms: int) -> int:
    """When the last of programs that take so long ends, if each takes the next in order as it gets free."""
    ends = [0] * num_sms
    for length in lens:
        ends[ends.index(min(ends))] += length
    return max(ends)


SMS, HEADS, GROUP = 132, 8, 4


@pytest.mark.parametrize(
    ("new_tokens", "before", "gain_min"),
    [([64], [32768], 6), ([16], [131072], 14), ([512], [131072], 0.9), ([32] * 4, [65536, 1000, 300, 20000], 6)],
    ids=["short", "tiny", "enough", "ragged"],
)
def test_few_chunks_after_long_contexts_are_cut(new_tokens: list[int], before: list[int], gain_min: float) -> None:
    tiles = contexts_of(new_tokens, before, GROUP)
    whole = last_end([length for length in tiles[2].tolist() for _ in range(HEADS)], SMS)
    cut = cut_tiles(*tiles, HEADS, SMS)
    if cut is None:
        assert gain_min < 1
        return
    # What starting and joining a piece costs is counted here too.
    lens = (cut.pieces[3] - cut.pieces[2] + 512).tolist()
    assert whole / last_end([length for length in lens for _ in range(HEADS)], SMS) >= gain_min
    assert cut.num_results * HEADS <= 4 * SMS


@pytest.mark.parametrize(
    ("new_tokens", "before"), [([8192], [0]), ([2048], [30000]), ([20], [900]), ([2] * 300, [90] * 300)]
)
def test_what_keeps_the_device_busy_or_is_short_is_not_cut(new_tokens: list[int], before: list[int]) -> None:
    assert cut_tiles(*contexts_of(new_tokens, before, GROUP), HEADS, SMS) is None


def test_pieces_are_the_whole_context_once() -> None:
    rows, starts, contexts = contexts_of([40, 3, 2], [5000, 200, 9000], GROUP)
    cut = cut_tiles(rows, starts, contexts, HEADS, SMS)
    assert cut is not None
    results: list[int] = []
    for row, start, context in zip(rows, starts, contexts, strict=True):
        mine = cut.pieces[:, (cut.pieces[0] == row) & (cut.pieces[1] == start)]
        mine = mine[:, np.argsort(mine[2])]
        assert mine[2].tolist() == [0, *mine[3, :-1].tolist()]
        assert mine[3, -1] == context
        assert (mine[2] % 64 == 0).all()
        joined = cut.joins[:, (cut.joins[0] == row) & (cut.joins[1] == start)]
        if mine.shape[1] == 1:
            assert mine[4].tolist() == [-1]
            assert joined.size == 0
        else:
            first, count = joined[2:, 0].tolist()
            assert mine[4].tolist() == list(range(first, first + count))
            results += range(first, first + count)
    assert sorted(results) == list(range(cut.num_results))
    assert (np.diff(cut.pieces[3] - cut.pieces[2]) <= 0).all()
