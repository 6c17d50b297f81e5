"""How the kernels are launched: fixed tile sizes and options, and how decodes are split. No tuning at run time.

The sizes were chosen for sm_90 from compiled listings (registers, shared memory, no spills), which the offline
compile test keeps true.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

COPY_TILE = 2048  # words of a block per program: 16 bytes a thread, four times
WRITE_TILE = 512  # elements of a program's half heads
DECODE_TILE = 64  # context tokens per iteration: the matrix unit's 64 rows
EXTEND_TILE = 64  # context tokens per iteration
EXTEND_ROWS = 128  # packed query rows per program
REDUCE_SPLITS = 16  # splits per iteration

DECODE_PROGRAMS_PER_SM = 3  # 72 KiB of shared memory each at D = 128
_START_TOKENS = 128  # what starting a program costs, in context tokens read meanwhile
_SPLIT_COUNTS = np.array([*range(1, 17), 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256, 384], dtype=np.int64)

Int32 = npt.NDArray[np.int32]

# Said explicitly, as Triton is about to change its default.
COMMON_OPTIONS: dict[str, int | bool] = {"enable_fp_fusion": True}
DECODE_OPTIONS: dict[str, int | bool] = {**COMMON_OPTIONS, "num_warps": 4, "num_stages": 3}


def copy_tiles(width: int) -> tuple[int, int, dict[str, int | bool]]:
    """For blocks of `width` words: programs per block, words per program, options."""
    tile = min(COPY_TILE, 1 << (width - 1).bit_length())
    return -(-width // tile), tile, {**COMMON_OPTIONS, "num_warps": max(1, min(4, tile // 128))}


def write_tile(head_dim: int) -> tuple[int, int, dict[str, int | bool]]:
    """Padded half of a head, heads per program, options. A thread has 8 elements of each half: 16 bytes of bfloat16."""
    half = 1 << (head_dim // 2 - 1).bit_length()
    heads = max(1, WRITE_TILE // half)
    return half, heads, {**COMMON_OPTIONS, "num_warps": max(1, heads * half // 256)}


def extend_options(head_padded: int) -> dict[str, int | bool]:
    """8 warps from 64 columns on: with 4, the float32 tile of 128 rows leaves few registers or spills."""
    return {**COMMON_OPTIONS, "num_warps": 8 if head_padded >= 64 else 4, "num_stages": 3}


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


def split_tokens(context_lens: Int32, num_kv_heads: int, num_sms: int) -> int:
    """Context tokens per decode program, a multiple of DECODE_TILE.

    One length for all rows keeps programs equal, so a ragged batch balances as a uniform one does. Chosen is the
    length whose programs, running in waves over the device, finish first.
    """
    lens = context_lens.astype(np.int64)
    longest = int(lens.max(initial=1))
    pieces = -(-longest // _SPLIT_COUNTS)
    candidates = np.unique(-(-pieces // DECODE_TILE) * DECODE_TILE)
    programs = num_kv_heads * (-(-lens[:, None] // candidates)).sum(axis=0)
    waves = -(-programs // (num_sms * DECODE_PROGRAMS_PER_SM))
    cost = waves * (candidates + _START_TOKENS)
    # Of equals the longest: it leaves the fewest partial results to join.
    return int(candidates[::-1][np.argmin(cost[::-1])])
