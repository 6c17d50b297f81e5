"""Decode rows whose tables begin with the same blocks: they are found on the host, and read together on the device.

    row 0   |aaaa|bbbb|cccc|dddd|x|         in order of their tables, rows that share are neighbours
    row 3   |aaaa|bbbb|cccc|dddd|yy|yyyy|
    row 1   |aaaa|bbbb|cccc|eeee|z|         together: |aaaa|bbbb|cccc|, the least that two neighbours share
    row 2   |ffff|gggg|                     alone

One level of sharing is used: of the depths 256, 512, 1024, ... tokens the one at which most reading is saved, if that
is worth a launch. A group has no more rows than fit side by side in a tile; a larger one is cut into even parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coppice_worker.kernels.triton import launch

Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """As in `arrays.Prefixes`: shapes do not depend on who shares."""

    members: Int32  # [PREFIX_GROUPS_MAX, prefix_members(group)]
    starts: Int32  # [PREFIX_GROUPS_MAX + 1]
    places: Int32  # [S]


@dataclass(frozen=True, slots=True)
class _Parts:
    """N neighbours, cut into parts that fit a tile."""

    of_row: Int64  # [N] part of each
    within: Int64  # [N] place of each in its part
    sizes: Int64  # [parts] rows
    shared: Int64  # [parts] tokens that all of them begin with

    def saved(self) -> Int64:
        """[parts] context tokens that need not be read again."""
        return (self.sizes - 1) * self.shared


def no_groups(num_rows: int, group: int) -> PrefixGroups:
    """Nobody shares; `group` query heads share a KV head."""
    members = np.full((launch.PREFIX_GROUPS_MAX, launch.prefix_members(group)), -1, np.int32)
    return PrefixGroups(members, np.zeros(len(members) + 1, np.int32), np.full(num_rows, -1, np.int32))


def find_groups(
    tables: Int32, context_lens: Int32, decodes: Bool, *, block_size: int, num_kv_heads: int, group: int
) -> PrefixGroups | None:
    """Of tables [S, W], rows that decode; None if nobody shares enough to be worth a launch."""
    unit = max(block_size, launch.DECODE_TILE)
    # The newest token is left to the row's own launch, which must find something to read.
    limits = np.where(decodes, (context_lens.astype(np.int64) - 1) // unit * unit, 0)
    rows = np.flatnonzero(limits >= launch.PREFIX_TOKENS_MIN)
    members_max = launch.prefix_members(group)
    if members_max == 0 or rows.size < 2 or launch.PREFIX_TOKENS_MIN % block_size:
        return None
    depths = _depths(limits)
    rows = _in_order(tables, limits, rows, depths, block_size)
    common = _common_tokens(tables, limits, rows, block_size) // unit * unit
    if not common.any():
        return None
    parts = max((_cut(common, depth, members_max) for depth in depths), key=lambda parts: int(parts.saved().sum()))
    best = np.argsort(-parts.saved(), kind="stable")[: launch.PREFIX_GROUPS_MAX]
    best = best[parts.saved()[best] > 0]
    if parts.saved()[best].sum() < launch.PREFIX_SAVED_MIN:
        return None
    number = np.full(parts.sizes.size, -1)
    number[best] = np.arange(best.size)
    taken = number[parts.of_row] >= 0
    of_row, within, rows = number[parts.of_row[taken]], parts.within[taken], rows[taken]
    groups = no_groups(len(tables), group)
    groups.members[of_row, within] = rows
    groups.places[rows] = of_row * members_max + within
    tiles = np.zeros(len(groups.members), np.int64)
    tiles[: best.size] = parts.shared[best] // launch.DECODE_TILE
    groups.starts[1:] = np.cumsum(tiles * num_kv_heads)
    return groups


def _depths(limits: Int64) -> Int64:
    """The least number of tokens to share, and its doubles as far as there are any."""
    doubles = int(limits.max() // launch.PREFIX_TOKENS_MIN).bit_length()
    return launch.PREFIX_TOKENS_MIN << np.arange(doubles, dtype=np.int64)


def _in_order(tables: Int32, limits: Int64, rows: Int64, depths: Int64, block_size: int) -> Int64:
    """Rows with equal blocks at these depths, from the first one on, become neighbours."""
    ids = tables[rows[:, None], depths // block_size - 1].astype(np.int64)
    ids = np.where(limits[rows, None] < depths, -1 - rows[:, None], ids)
    ordered: Int64 = rows[np.lexsort(ids.T[::-1])]
    return ordered


def _common_tokens(tables: Int32, limits: Int64, rows: Int64, block_size: int) -> Int64:
    """[N - 1] tokens that each of N rows has in common with the next one; 0 for few."""
    left, right = rows[:-1], rows[1:]
    column = launch.PREFIX_TOKENS_MIN // block_size - 1
    pairs = np.flatnonzero(tables[left, column] == tables[right, column])
    limit = np.minimum(limits[left[pairs]], limits[right[pairs]])
    width = int(limit.max(initial=block_size)) // block_size
    differs = tables[left[pairs], :width] != tables[right[pairs], :width]
    blocks = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
    common = np.zeros(left.size, np.int64)
    common[pairs] = np.minimum(blocks * block_size, limit)
    return common


def _cut(common: Int64, depth: int, members_max: int) -> _Parts:
    """Neighbours that have at least `depth` tokens in common stay together, as far as they fit."""
    apart = np.flatnonzero(common < depth) + 1
    starts = np.concatenate([[0], apart])
    lengths = np.diff(starts, append=common.size + 1)
    to_next = np.concatenate([common, [0]])
    to_next[np.append(apart - 1, common.size)] = np.iinfo(np.int64).max  # the last of a run has no next one in it
    shared = np.where(lengths > 1, np.minimum.reduceat(to_next, starts), 0)
    counts = -(-lengths // members_max)
    index = np.arange(common.size + 1) - np.repeat(starts, lengths)
    first_part = np.repeat(np.cumsum(counts) - counts, lengths)
    of_row = first_part + index * np.repeat(counts, lengths) // np.repeat(lengths, lengths)
    sizes = np.bincount(of_row)
    within = np.arange(of_row.size) - (np.cumsum(sizes) - sizes)[of_row]
    return _Parts(of_row, within, sizes, np.repeat(shared, counts))
