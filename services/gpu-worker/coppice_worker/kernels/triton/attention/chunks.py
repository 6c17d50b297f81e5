"""Rows with several new tokens in a graph: as many programs as a step of that many tokens may need.

    | tiles: rows | their starts | pieces: 5 numbers each | joins: 4 numbers each |       int32, by `ChunkRoom`
         |  0  0  2  -1 -1           programs of row -1 do nothing

Layers without a window compute pieces, also where no tile is cut: then each is one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from coppice_worker.core.batch.step_batch import Int32, Int64, StepBatch
from coppice_worker.kernels.triton.attention.extend_launch import (
    EXTEND_ROWS,
    cut_tiles,
    extend_tiles,
    results_max,
    tile_contexts,
)

CHUNKS_MAX = 32  # rows with several new tokens in a graph
_ALIGNED = 4  # numbers: kernels are compiled for addresses that are multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class ChunkRoom:
    """Numbers of programs that a graph has; the first two are multiples of `_ALIGNED`."""

    tiles: int
    pieces: int
    results: int  # of pieces that are joined

    @property
    def size(self) -> int:
        return sum(kinds * count for kinds, count in self._parts())

    def _parts(self) -> tuple[tuple[int, int], ...]:
        return (1, self.tiles), (1, self.tiles), (5, self.pieces), (4, self.tiles)

    def places(self) -> list[tuple[slice, int, int]]:
        """Where each part is, how many numbers of a kind it has, and of how many kinds."""
        found, start = [], 0
        for kinds, count in self._parts():
            end = start + kinds * count
            found.append((slice(start, end), kinds, count))
            start = end
        return found


def chunk_room(num_tokens: int, *, group: int, num_kv_heads: int, num_sms: int) -> ChunkRoom:
    """For steps of up to `num_tokens` new tokens; each of a row's tiles but the last is full."""
    tiles = _padded(num_tokens * group // EXTEND_ROWS + min(num_tokens // 2, CHUNKS_MAX))
    results = results_max(num_kv_heads, num_sms)
    return ChunkRoom(tiles, _padded(tiles + results), results)


def tiles_of(batch: StepBatch, group: int) -> tuple[Int32, Int32, Int64]:
    """Sequence row, first packed query row and context of each tile of the rows with several new tokens."""
    new_tokens = np.diff(batch.query_starts)
    rows = np.flatnonzero(new_tokens > 1).astype(np.int32)
    tile_rows, tile_starts = extend_tiles(rows, new_tokens[rows] * group)
    return tile_rows, tile_starts, tile_contexts(tile_rows, tile_starts, batch.context_lens, new_tokens, group)


def packed_chunks(batch: StepBatch, room: ChunkRoom, *, group: int, num_kv_heads: int, num_sms: int) -> Int32 | None:
    """[room.size]; None where the batch has more tiles than there is room for."""
    rows, starts, contexts = tiles_of(batch, group)
    if len(rows) > room.tiles:
        return None
    cut = cut_tiles(rows, starts, contexts, num_kv_heads, num_sms)
    if cut is None:
        none = np.full_like(rows, -1)
        pieces, joins = np.stack([rows, starts, np.zeros_like(rows), contexts, none]), np.zeros((4, 0), np.int32)
    else:
        pieces, joins = cut.pieces, cut.joins
    packed = np.full(room.size, -1, np.int32)
    for (place, kinds, count), part in zip(room.places(), (rows, starts, pieces, joins), strict=True):
        numbers = part.reshape(kinds, -1)
        packed[place].reshape(kinds, count)[:, : numbers.shape[1]] = numbers
    return packed


def unpacked_chunks(packed: torch.Tensor, room: ChunkRoom) -> tuple[torch.Tensor, ...]:
    """Views: rows of tiles [tiles], their starts [tiles], pieces [5, pieces], joins [4, tiles]."""
    parts = [packed[place].view(kinds, count) for place, kinds, count in room.places()]
    return parts[0][0], parts[1][0], parts[2], parts[3]


def _padded(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
