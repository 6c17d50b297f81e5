"""How the kernels are launched: fixed tile sizes and options, and how decodes are split. No tuning at run time.

The sizes were chosen for sm_90 from compiled listings (registers, shared memory, no spills), which the offline
compile test keeps true.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

COPY_TILE = 2048  # words of a block per program: 16 bytes a thread, four times
GATE_TILE = 1024  # elements of a program's gates
VOCAB_TILE = 2048  # tokens
WRITE_TILE = 512  # elements of a program's half heads
DECODE_TILE = 64  # context tokens per iteration: the matrix unit's 64 rows
REDUCE_PIECES = 32  # pieces per iteration
PLAN_ROWS = 1024  # rows per iteration

PREFIX_COLUMNS = 32  # query heads of a group of rows, over one KV head
PREFIX_GROUPS_MAX = 32
PREFIX_TOKENS_MIN = 256  # that a group shares
PREFIX_SAVED_MIN = 8192  # context tokens that all groups together read less: a launch takes as long as half of them

Int32 = npt.NDArray[np.int32]

# Said explicitly, as Triton is about to change its default.
COMMON_OPTIONS: dict[str, int | bool] = {"enable_fp_fusion": True}
REDUCE_OPTIONS: dict[str, int | bool] = {**COMMON_OPTIONS, "num_warps": 4}


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


def padded(size: int) -> int:
    """The least power of two that holds `size` and fills a matrix instruction."""
    return max(16, 1 << (size - 1).bit_length())


def decode_options(head_dim: int, columns: int) -> dict[str, int | bool]:
    """With 3 stages one tile of K and V is on its way while another is computed; three of them take 104 KiB at D = 128.

    With 2, nothing is on its way meanwhile but what other programs asked for.

    K and V come by copies of 16 bytes (8 of float8) a thread. A tensor copy of a whole tile would take a quarter of the
    loop's 412 instructions away, but only for blocks of 64 tokens or more; and a multiprocessor has 1,800 cycles for
    the loop until memory has delivered the next tile, so instructions are not what it waits for.
    """
    is_large = padded(head_dim) * padded(columns) > 256 * 32
    return {**COMMON_OPTIONS, "num_warps": 4, "num_stages": 2 if is_large else 3}


def decode_programs_per_sm(head_dim: int, has_float8: bool) -> int:
    """As many as have room beside each other with each of Triton 3.6, 3.7 and 3.9."""
    if head_dim <= 64:
        return 3 if has_float8 else 4
    return 2 if head_dim <= 128 or has_float8 else 1


def prefix_programs_per_sm(head_dim: int, has_float8: bool) -> int:
    """Likewise, of those over what rows have in common."""
    if has_float8:
        return 2
    return 4 if head_dim <= 64 else 2 if head_dim <= 128 else 1


def prefix_members(group: int) -> int:
    """Rows that a program takes together over their common prefix; 0 where fewer than two fit."""
    members = PREFIX_COLUMNS // group
    return members if members >= 2 else 0
