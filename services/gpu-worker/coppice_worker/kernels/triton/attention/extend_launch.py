"""How rows with several new tokens are cut into programs, and with which sizes and options these are compiled.

    a row's packed queries    |---- tile ----|---- tile ----|-- tile --|     EXTEND_ROWS each: new tokens x query heads
    a tile's context          |== piece ==|== piece ==|= piece =|            where tiles leave much of the device idle

No tuning at run time: sizes were chosen from listings compiled for sm_90, which the offline compile test keeps true;
those of heads of 128 columns were measured on an H200.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from coppice_worker.kernels.backend import LayerAttention
from coppice_worker.kernels.triton.launch import COMMON_OPTIONS

EXTEND_ROWS = 128  # packed query rows per tile: 64 for each of two warp groups, in one program or in two
JOIN_ROWS = 16  # packed query rows per program that joins pieces

_PIECE_TOKENS_MIN = 512
_PIECE_COUNTS = np.array([*range(1, 17), 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256], dtype=np.int64)
_PIECE_TOKENS_STEP = 64  # a multiple of all sizes of tiles of context
_PIECE_COST = 512  # of starting one and joining its result, in context tokens attended to meanwhile
_PIECES_PER_SM_MAX = 4  # bounds the room for their results: 64 KiB each at D = 128
_GAIN_MIN = 1.25  # for less it is not worth another launch

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ExtendShape:
    """Constants of a program."""

    rows: int  # packed query rows, a divisor of EXTEND_ROWS
    tile: int  # context tokens per iteration
    options: dict[str, int | bool]


def extend_shape(head_padded: int, query: torch.dtype, blocks: torch.dtype) -> ExtendShape:
    """What suits heads of that many columns and what queries and blocks consist of.

    - 65 to 128 columns: programs of one warp group, two of them on a multiprocessor: one multiplies while the other has
      its softmax. In blocks of 16 an H200 takes 3 to 10 % less for them than for one program of two warp groups that
      asks for a tile's scores before the softmax of the one before it.
    - 64 and less: programs of two warp groups, two side by side.
    - 256: the output takes 128 registers of a thread, and queries half of shared memory; so tiles are short.
    - float8 passes through registers to be converted, and takes two warp groups for it.
    - float32 does without the matrix unit, and needs so many registers that tiles are tiny; it is there to be exact.
    """
    if query == torch.float32:
        return ExtendShape(16, 16, {**COMMON_OPTIONS, "num_warps": 4, "num_stages": 1})
    # A table entry is read before the block that it names. Of five stages two are for each, so that a tile is copied
    # while the one before it is computed; with three, every copy is waited for at once.
    options = {**COMMON_OPTIONS, "num_warps": 8, "num_stages": 5}
    is_float8 = blocks.itemsize == 1
    if 64 < head_padded <= 128 and not is_float8:
        return ExtendShape(64, 64, {**options, "num_warps": 4})
    if head_padded <= 128:
        return ExtendShape(EXTEND_ROWS, 64, options)
    return ExtendShape(64 if is_float8 else EXTEND_ROWS, 32, options)


def score_factors(layer: LayerAttention) -> tuple[float, float]:
    """Of products q k: what makes them twice the tanh's argument (unused without a cap), then powers of two; base 2."""
    assert layer.scale > 0
    log2_e = math.log2(math.e)
    if layer.soft_cap is None:
        return 1.0, layer.scale * log2_e
    return 2 * layer.scale * log2_e / layer.soft_cap, layer.soft_cap * log2_e


def extend_tiles(rows: Int32, packed_lens: Int32) -> tuple[Int32, Int32]:
    """Sequence row and first packed query row of each tile, for rows with that many packed query rows.

    Long rows come first and each row from its end, where a tile sees most context: the last tiles are short ones.
    """
    order = np.argsort(-packed_lens, kind="stable")
    counts = -(-packed_lens[order] // EXTEND_ROWS)
    tile_rows = np.repeat(rows[order], counts)
    within = np.arange(tile_rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
    tile_starts = (np.repeat(counts, counts) - 1 - within) * EXTEND_ROWS
    return tile_rows.astype(np.int32), tile_starts.astype(np.int32)


def tile_contexts(tile_rows: Int32, tile_starts: Int32, context_lens: Int32, new_tokens: Int32, group: int) -> Int64:
    """[tiles]: how many context tokens the last query of each tile sees, without a window."""
    last = np.minimum((tile_starts + EXTEND_ROWS - 1) // group, new_tokens[tile_rows] - 1)
    return (context_lens[tile_rows] - new_tokens[tile_rows] + last + 1).astype(np.int64)


def results_max(num_kv_heads: int, num_sms: int) -> int:
    """Of the pieces of a step."""
    return num_sms * _PIECES_PER_SM_MAX // num_kv_heads


def piece_tokens(context_lens: Int64, num_kv_heads: int, num_sms: int) -> int:
    """Context tokens per piece for tiles that see that many, [tiles]; not less than the longest: nothing is cut.

    A few chunks after long contexts are few programs with much to do each. One length for all pieces keeps them equal.
    Chosen is the one with which the last program ends first: either all multiprocessors are busy to the end, or pieces
    of full length run in so many rounds.
    """
    longest = int(context_lens.max(initial=0))
    if num_kv_heads * context_lens.size >= num_sms * 2 * _PIECES_PER_SM_MAX or longest < 2 * _PIECE_TOKENS_MIN:
        return longest
    step = _PIECE_TOKENS_STEP
    lens = np.maximum(-(-longest // _PIECE_COUNTS), _PIECE_TOKENS_MIN)
    lens = np.unique(-(-lens // step) * step)
    counts = -(-context_lens[:, None] // lens)
    fits = np.where(counts > 1, counts, 0).sum(axis=0) <= results_max(num_kv_heads, num_sms)
    busy = num_kv_heads * (context_lens.sum() + _PIECE_COST * counts.sum(axis=0)) / num_sms
    full = num_kv_heads * np.maximum((context_lens[:, None] // lens).sum(axis=0), 1)
    rounds = -(-full // num_sms) * (np.minimum(lens, longest) + _PIECE_COST)
    time = np.where(fits, np.maximum(busy, rounds), np.inf)
    best = int(np.argmin(time))
    return int(lens[best]) if time[best] * _GAIN_MIN < time[-1] else longest


@dataclass(frozen=True, slots=True)
class Cut:
    """Tiles whose context is cut into pieces, and those which are not and count as one piece."""

    pieces: Int32  # [5, P]: sequence row, first packed query row, context from, to; result, or -1: it is the output
    joins: Int32  # [4, J]: sequence row, first packed query row; first result, number of results
    num_results: int


def cut_tiles(tile_rows: Int32, tile_starts: Int32, context_lens: Int64, num_kv_heads: int, num_sms: int) -> Cut | None:
    """For tiles that see that many context tokens, [tiles]; None if nothing is cut."""
    length = piece_tokens(context_lens, num_kv_heads, num_sms)
    counts = -(-context_lens // max(length, 1))
    if counts.max(initial=0) <= 1:
        return None
    tile = np.repeat(np.arange(counts.size), counts)
    first_piece = np.cumsum(counts) - counts
    start = (np.arange(tile.size) - first_piece[tile]) * length
    end = np.minimum(start + length, context_lens[tile])
    cut = counts > 1
    first_result = np.cumsum(np.where(cut, counts, 0)) - np.where(cut, counts, 0)
    result = np.where(cut[tile], first_result[tile] + start // length, -1)
    pieces = np.stack([tile_rows[tile], tile_starts[tile], start, end, result]).astype(np.int32)
    longest_first = np.argsort(start - end, kind="stable")
    joins = np.stack([tile_rows[cut], tile_starts[cut], first_result[cut], counts[cut]]).astype(np.int32)
    return Cut(pieces[:, longest_first], joins, int(counts[cut].sum()))
