"""How the kernels are launched: fixed tile sizes and options, and how decodes are split. No tuning at run time.

The sizes were chosen for sm_90 from compiled listings (registers, shared memory, no spills), which the offline
compile test keeps true; those of heads of 128 columns were measured on an H200.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

COPY_TILE = 2048  # words of a block per program: 16 bytes a thread, four times
GATE_TILE = 1024  # elements of a program's gates
VOCAB_TILE = 2048  # tokens
WRITE_TILE = 512  # elements of a program's half heads
DECODE_TILE = 64  # context tokens per iteration: the matrix unit's 64 rows
REDUCE_PIECES = (4, 32)  # pieces per iteration: least, most
PLAN_ROWS = 1024  # rows per iteration

FEW_ROWS = 16  # that a projection has at most to be one of few rows: the narrow side of its products
FEW_ROWS_COLUMNS = 64  # of a program: the matrix unit's 64 rows

PREFIX_COLUMNS = 32  # query heads of a group of rows, over one KV head
PREFIX_GROUPS_MAX = 32
PREFIX_TOKENS_MIN = 256  # that a group shares
PREFIX_SAVED_MIN = 8192  # context tokens that all groups together read less: a launch takes as long as half of them

Int32 = npt.NDArray[np.int32]

# Said explicitly, as Triton is about to change its default.
COMMON_OPTIONS: dict[str, int | bool] = {"enable_fp_fusion": True}


def reduce_tile(programs: int, units: int) -> tuple[int, dict[str, int | bool]]:
    """Pieces per iteration, as a power of two, and options, where that many programs leave pieces of that many
    contexts (rows x KV heads): of a large batch each has one or two, and a tile of 32 is work for nothing."""
    least, most = REDUCE_PIECES
    pieces = min(max(1 << (programs // max(1, units) + 1).bit_length(), least), most)
    return pieces, {**COMMON_OPTIONS, "num_warps": max(1, pieces // 8)}


def copy_tiles(width: int) -> tuple[int, int, dict[str, int | bool]]:
    """For blocks of `width` words: programs per block, words per program, options."""
    tile = min(COPY_TILE, 1 << (width - 1).bit_length())
    return -(-width // tile), tile, {**COMMON_OPTIONS, "num_warps": max(1, min(4, tile // 128))}


def write_tile(head_dim: int) -> tuple[int, int, dict[str, int | bool]]:
    """Padded half of a head, heads per program, options. A thread has 8 elements of each half: 16 bytes of bfloat16."""
    half = 1 << (head_dim // 2 - 1).bit_length()
    heads = max(1, WRITE_TILE // half)
    return half, heads, {**COMMON_OPTIONS, "num_warps": max(1, heads * half // 256)}


def row_tile(size: int) -> tuple[int, dict[str, int | bool]]:
    """Padded size of a row that one program holds, and options: a thread has 16 elements of it or more."""
    padded = max(32, 1 << (size - 1).bit_length())
    return padded, {**COMMON_OPTIONS, "num_warps": max(1, min(16, padded // 512))}


def vocab_tile(vocab: int) -> tuple[int, int, dict[str, int | bool]]:
    """Tokens per iteration of a program that looks at a whole row of logits, iterations as a power of two, options."""
    tile = max(128, min(VOCAB_TILE, 1 << (vocab - 1).bit_length()))
    tiles = 1 << (-(-vocab // tile) - 1).bit_length()
    return tile, tiles, {**COMMON_OPTIONS, "num_warps": max(1, tile // 128)}


def one_row_tile(depth: int, *, is_gated: bool) -> tuple[int, int, dict[str, int | bool]]:
    """Columns of a program, of each of gate and up; elements of the row per iteration; options."""
    tile_depth = max(128, min(2048, 1 << (depth - 1).bit_length()))
    return 1 if is_gated else 2, tile_depth, {**COMMON_OPTIONS, "num_warps": 4}


def few_rows_tile(columns: int, *, is_gated: bool) -> tuple[int, int, dict[str, int | bool]]:
    """Likewise. So many stages that few programs (64 of a weight with 4,096 rows) have enough on its way."""
    stages = 4 if is_gated or columns >= 16_384 else 6
    return FEW_ROWS_COLUMNS, 128 if not is_gated else 64, {**COMMON_OPTIONS, "num_warps": 4, "num_stages": stages}


def padded(size: int) -> int:
    """The least power of two that holds `size` and fills a matrix instruction."""
    return max(16, 1 << (size - 1).bit_length())


def decode_options(head_dim: int, columns: int, has_float8: bool) -> dict[str, int | bool]:
    """With 3 stages one tile of K and V is on its way while another is computed; three of them take 104 KiB at D = 128.

    With 2, nothing is on its way meanwhile but what other programs asked for.

    K and V come by copies of 16 bytes a thread. A tensor copy of a whole tile would take a quarter of the loop's 412
    instructions away, but only for blocks of 64 tokens or more; and a multiprocessor has 1,800 cycles for the loop
    until memory has delivered the next tile, so instructions are not what it waits for.

    Tiles of float8 are ahead in registers, by the kernel itself.
    """
    if has_float8:
        return {**COMMON_OPTIONS, "num_warps": 4 if padded(head_dim) <= 128 else 8, "num_stages": 1}
    is_large = padded(head_dim) * padded(columns) > 256 * 32
    options = {**COMMON_OPTIONS, "num_warps": 4, "num_stages": 2 if is_large else 3}
    # Four programs of 128 threads have 128 registers a thread; Triton 3.9 takes 134 over common prefixes by itself.
    return {**options, "maxnreg": 128} if head_dim <= 64 and columns <= PREFIX_COLUMNS else options


def decode_programs_per_sm(head_dim: int, has_float8: bool) -> int:
    """As many as have room beside each other with each of Triton 3.6, 3.7 and 3.9: of a row's own, and of those over
    what rows have in common."""
    if head_dim <= 64:
        return 2 if has_float8 else 4
    return 2 if head_dim <= 128 else 1


def prefix_members(group: int) -> int:
    """Rows that a program takes together over their common prefix; 0 where fewer than two fit."""
    members = PREFIX_COLUMNS // group
    return members if members >= 2 else 0
