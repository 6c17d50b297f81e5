"""Which decode rows are read together over what they share, checked without launching anything."""

from __future__ import annotations

import numpy as np
import pytest

from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.attention.cascade import Int32, PrefixGroups, find_groups, no_groups

HK, GROUP = 2, 4
MEMBERS = launch.prefix_members(GROUP)


def find(tables: Int32, lens: list[int], block_size: int = 16) -> PrefixGroups | None:
    context_lens = np.array(lens, np.int32)
    return find_groups(tables, context_lens, context_lens > 0, block_size=block_size, num_kv_heads=HK, group=GROUP)


def tables_of(paths: list[list[int]], block_size: int = 16) -> tuple[Int32, list[int]]:
    """Rows that go through segments of 512 tokens with these names, and then 20 tokens of their own."""
    per_segment = 512 // block_size
    width = max(map(len, paths)) * per_segment + 2
    tables = np.zeros((len(paths), width), np.int32)
    for row, path in enumerate(paths):
        # A block is named by everything before it: the same segment elsewhere is other blocks.
        names = [
            hash(tuple(path[: depth + 1])) % (1 << 20) * per_segment + i
            for depth in range(len(path))
            for i in range(per_segment)
        ]
        tables[row, : len(names)] = names
        tables[row, len(names) : len(names) + 2] = (1 << 30) + 2 * row + np.arange(2)
    return tables, [len(path) * 512 + 20 for path in paths]


def as_sets(groups: PrefixGroups) -> dict[frozenset[int], int]:
    """Rows of each group -> tokens that they share; the arrays agree with each other."""
    tiles = np.diff(groups.starts) // HK
    found = {}
    for number, members in enumerate(groups.members.tolist()):
        rows = [row for row in members if row >= 0]
        assert members[: len(rows)] == rows
        assert (tiles[number] > 0) == bool(rows)
        for place, row in enumerate(rows):
            assert groups.places[row] == number * MEMBERS + place
        if rows:
            found[frozenset(rows)] = int(tiles[number]) * launch.DECODE_TILE
    assert (groups.places >= 0).sum() == sum(map(len, found))
    return found


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_rows_of_two_prompts(block_size: int) -> None:
    tables, lens = tables_of([[i % 2] * 8 for i in range(10)] + [[7] * 8], block_size)
    groups = find(tables, lens, block_size)
    assert groups is not None
    assert as_sets(groups) == {frozenset(range(0, 10, 2)): 4096, frozenset(range(1, 10, 2)): 4096}
    assert groups.members.shape == no_groups(11, GROUP).members.shape


def test_of_several_depths_the_one_that_saves_most() -> None:
    pairs = [[1, i // 2, *[3] * 14] for i in range(4)]
    groups = find(*tables_of(pairs))
    assert groups is not None
    assert as_sets(groups) == {frozenset({0, 1}): 8192, frozenset({2, 3}): 8192}
    crowd = [[1, 2, 3, 4, 5, 6, 7, i // 2, 8] for i in range(8)]
    groups = find(*tables_of(crowd))
    assert groups is not None
    assert as_sets(groups) == {frozenset(range(8)): 3584}


def test_a_large_group_is_cut_into_even_parts() -> None:
    groups = find(*tables_of([[1] * 4] * (MEMBERS * 2 + 1)))
    assert MEMBERS == 8
    assert groups is not None
    assert sorted(map(len, as_sets(groups))) == [5, 6, 6]


def test_the_newest_token_is_not_shared() -> None:
    """Rows that are equal to the last block: each still has something of its own to read."""
    tables = np.tile(np.arange(600, dtype=np.int32), (4, 1))
    groups = find(tables, [8192, 8193, 9000, 8200])
    assert groups is not None
    assert as_sets(groups) == {frozenset(range(4)): 8192 - 64}


@pytest.mark.parametrize(
    ("paths", "padding"),
    [([[i] * 9 for i in range(9)], 0), ([[1, i] for i in range(3)], 0), ([[1] * 9], 0), ([[1] * 9] * 2, 1)],
    ids=["nobody shares", "not worth a launch", "one row", "one row and padding"],
)
def test_no_groups(paths: list[list[int]], padding: int) -> None:
    tables, lens = tables_of(paths)
    if padding:
        lens[-padding:] = [0] * padding
    assert find(tables, lens) is None


def test_no_room_for_two_rows_in_a_tile() -> None:
    tables, lens = tables_of([[1] * 9] * 9)
    context_lens = np.array(lens, np.int32)
    assert find_groups(tables, context_lens, context_lens > 0, block_size=16, num_kv_heads=1, group=64) is None


def test_random_trees() -> None:
    """What is said to be shared is; no more groups than there is room for."""
    rng = np.random.default_rng(5)
    most = 0
    for _ in range(30):
        paths = [rng.integers(0, 3, rng.integers(1, 6)).tolist() for _ in range(int(rng.integers(2, 200)))]
        tables, lens = tables_of([[0, *path] if rng.random() < 0.9 else path for path in paths])
        groups = find(tables, lens)
        if groups is None:
            continue
        sets = as_sets(groups)
        most = max(most, len(sets))
        for rows, shared in sets.items():
            members = sorted(rows)
            assert 2 <= len(members) <= MEMBERS
            assert launch.PREFIX_TOKENS_MIN <= shared < min(lens[row] for row in members)
            assert (tables[members, : shared // 16] == tables[members[0], : shared // 16]).all()
    assert most > 5
