"""How rows with several new tokens are cut into programs, and with which sizes and options these are compiled.

    a row's packed queries    |---- tile ----|---- tile ----|-- tile --|     EXTEND_ROWS each: new tokens x query heads

No tuning at run time: sizes were chosen from listings compiled for sm_90, which the offline compile test keeps true.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from coppice_worker.kernels.backend import LayerAttention

from .launch import COMMON_OPTIONS

EXTEND_ROWS = 128  # packed query rows per tile: 64 for each of two warp groups

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ExtendShape:
    """Constants of a program."""

    rows: int  # packed query rows, a divisor of EXTEND_ROWS
    tile: int  # context tokens per iteration
    scores_ahead: bool  # the next tile's scores are computed behind this tile's softmax
    options: dict[str, int | bool]


def extend_shape(head_padded: int, query: torch.dtype, blocks: torch.dtype) -> ExtendShape:
    """What suits heads of that many columns and what queries and blocks consist of.

    - 65 to 128 columns: one program has the multiprocessor for itself, and registers for a second tile of scores.
    - 64 and less: two programs side by side overlap each other and have no registers left for that.
    - 256: the output takes 128 registers of a thread, and queries half of shared memory; so tiles are short.
    - float8: keys pass through registers to be converted, so their scores cannot be ahead.
    - float32 does without the matrix unit, and needs so many registers that tiles are tiny; it is there to be exact.
    """
    if query == torch.float32:
        return ExtendShape(16, 16, False, {**COMMON_OPTIONS, "num_warps": 4, "num_stages": 1})
    # A table entry is read before the block that it names. Of five stages two are for each, so that a tile is copied
    # while the one before it is computed; with three, every copy is waited for at once.
    options = {**COMMON_OPTIONS, "num_warps": 8, "num_stages": 5}
    is_float8 = blocks.itemsize == 1
    if head_padded <= 64:
        return ExtendShape(EXTEND_ROWS, 64, False, options)
    if head_padded <= 128:
        return ExtendShape(EXTEND_ROWS, 64, not is_float8, options)
    if is_float8:
        return ExtendShape(64, 32, False, {**options, "num_stages": 3})
    return ExtendShape(EXTEND_ROWS, 32, False, options)


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
