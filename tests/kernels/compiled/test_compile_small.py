"""The kernels between attention, compiled for sm_90 without a GPU: 16 bytes at a time, nothing spilt."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs the Triton compiler, not its interpreter", allow_module_level=True)

from triton.backends.compiler import GPUTarget

from coppice_worker.kernels.pool import FLOAT8_MAX, SCALE_MIN
from coppice_worker.kernels.triton import arithmetic, blocks, few_rows, launch, sampling, write
from tests.kernels.compiled.sm90 import TOOLS, Compiled, assert_no_spills, compile_kernel

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this Triton has no CUDA tools"),
]


def accesses(compiled: Compiled, instruction: str) -> tuple[int, int]:
    """How many there are of 16 bytes, and how many in all."""
    found = re.findall(rf"\b{instruction}\.E[\w.]*", compiled.listing)
    return sum(".128" in access for access in found), len(found)


FEW_ROWS_TYPES = dict.fromkeys(("row_ptr", "rows_ptr", "weight_ptr"), "*bf16")


def compile_one_row(folder: Path, depth: int, *, is_gated: bool) -> Compiled:
    """Of a weight [any, depth] in bfloat16, without a bias."""
    tile, tile_depth, options = launch.one_row_tile(depth, is_gated=is_gated)
    constants = few_rows_constants(depth, tile, tile_depth, is_gated=is_gated)
    return compile_kernel(few_rows.one_row_kernel, constants, options, folder, FEW_ROWS_TYPES)


def compile_few_rows(folder: Path, depth: int, columns: int, *, is_gated: bool) -> Compiled:
    """Of two to FEW_ROWS rows; a weight [columns, depth], or of gate and up [2 columns, depth]."""
    tile, tile_depth, options = launch.few_rows_tile(columns, is_gated=is_gated)
    constants = few_rows_constants(depth, tile, tile_depth, is_gated=is_gated) | {"ROWS": launch.FEW_ROWS}
    return compile_kernel(few_rows.few_rows_kernel, constants, options, folder, FEW_ROWS_TYPES, ("num_columns",))


def few_rows_constants(depth: int, tile: int, tile_depth: int, *, is_gated: bool) -> dict[str, Any]:
    gate = {"GATED": is_gated, "IS_SILU": True, "bias_ptr": None}
    return {**gate, "DEPTH": depth, "COLUMNS": tile, "TILE_DEPTH": tile_depth}


def test_blocks_move_16_bytes_at_a_time(tmp_path: Path) -> None:
    tiles, tile, options = launch.copy_tiles(8192)
    assert (tiles, tile) == (4, launch.COPY_TILE)
    strides = ("src_plane", "src_block", "dst_plane", "dst_block")
    types: dict[str, str] = {
        "src_ptr": "*i32",
        "dst_ptr": "*i32",
        "planes_ptr": "*i32",
        **dict.fromkeys(strides, "i64"),
    }
    constants = {"TILES": tiles, "TILE": tile}
    gather = compile_kernel(
        blocks.move_blocks_kernel, {**constants, "dst_ids_ptr": None}, options, tmp_path, types, strides
    )
    zero = compile_kernel(blocks.zero_blocks_kernel, constants, options, tmp_path, types)
    for compiled in (gather, zero):
        assert_no_spills(compiled)
        # Full occupancy, 2048 threads: with four loads of each on their way, 128 KiB.
        assert compiled.programs_per_sm() >= 16
        assert accesses(compiled, "STG") == (4, 4)
    assert accesses(gather, "LDG")[0] == 4


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "pool", "has_norms"),
    [(32, 8, 128, "bf16", False), (32, 8, 128, "fp8e4nv", True), (14, 2, 64, "bf16", True), (8, 4, 256, "bf16", True)],
)
def test_write(num_heads: int, num_kv_heads: int, head_dim: int, pool: str, has_norms: bool, tmp_path: Path) -> None:
    half, heads, options = launch.write_tile(head_dim)
    constants: dict[str, Any] = {
        "FLOAT8_MAX": FLOAT8_MAX,
        "SCALE_MIN": SCALE_MIN,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HALF": head_dim // 2,
        "HALF_PADDED": half,
        "BLOCK_SIZE": 16,
        "HEADS": heads,
    }
    types = dict.fromkeys(("qkv_ptr", "cos_ptr", "sin_ptr"), "*bf16")
    types |= dict.fromkeys(("key_pool_ptr", "value_pool_ptr"), f"*{pool}") | {"eps": "fp32"}
    types |= dict.fromkeys(("query_norm_ptr", "key_norm_ptr", "key_scales_ptr", "value_scales_ptr"), "*fp32")
    if not has_norms:
        constants |= {"query_norm_ptr": None, "key_norm_ptr": None}
    if pool == "bf16":
        constants |= {"key_scales_ptr": None, "value_scales_ptr": None}
    compiled = compile_kernel(write.write_kernel, constants, options, tmp_path, types, ("qkv_stride",))
    assert_no_spills(compiled)
    assert compiled.programs_per_sm() * compiled.num_warps >= 32
    assert accesses(compiled, "LDG")[0] >= 2
    wide, stores = accesses(compiled, "STG")
    # The two halves of queries, keys and values; what is rounded to 8 bits leaves as 8 bytes a thread.
    assert (wide, stores) == (6, 6) if pool == "bf16" else wide == 2


def test_add_norm(tmp_path: Path) -> None:
    types = {"hidden_ptr": "*bf16", "delta_ptr": "*bf16", "weight_ptr": "*fp32", "out_ptr": "*bf16", "eps": "fp32"}
    for size in (4096, 16384):
        padded, options = launch.row_tile(size)
        constants = {"SIZE": size, "PADDED": padded}
        compiled = compile_kernel(arithmetic.add_norm_kernel, constants, options, tmp_path, types)
        assert_no_spills(compiled)
        assert compiled.programs_per_sm() * compiled.num_warps >= 32
        wide, stores = accesses(compiled, "STG")
        assert wide == stores == 2 * size // (compiled.num_warps * 32 * 8)


def test_gate(tmp_path: Path) -> None:
    types = {"both_ptr": "*bf16", "out_ptr": "*bf16"}
    constants = {"SIZE": 14336, "IS_SILU": True, "TILE": launch.GATE_TILE}
    compiled = compile_kernel(arithmetic.gate_kernel, constants, launch.COMMON_OPTIONS, tmp_path, types)
    assert_no_spills(compiled)
    assert compiled.programs_per_sm() >= 16
    assert accesses(compiled, "LDG") == (2, 2)
    assert accesses(compiled, "STG") == (1, 1)


def test_choose(tmp_path: Path) -> None:
    tile, tiles, options = launch.vocab_tile(152064)
    types = {"logits_ptr": "*bf16", "choices_ptr": "*fp64", "keys_ptr": "*i32", "tokens_ptr": "*i64"}
    constants = {"TILE": tile, "TILES": tiles}
    compiled = compile_kernel(sampling.choose_kernel, constants, options, tmp_path, types, ("stride", "vocab"))
    assert_no_spills(compiled)
    assert compiled.programs_per_sm() >= 1
    # Tiles are copied to shared memory ahead of where they are looked at.
    assert "LDGSTS" in compiled.listing


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("depth", "columns"), [(4096, 6144), (14336, 4096), (896, 4864)])
def test_projections_of_few_rows(depth: int, columns: int, is_gated: bool, tmp_path: Path) -> None:
    one = compile_one_row(tmp_path, depth, is_gated=is_gated)
    assert_no_spills(one)
    # What a multiprocessor has to have on its way, 40 KiB, is two thirds of what its programs ask for at once.
    assert one.programs_per_sm() >= 6
    wide, loads = accesses(one, "LDG")
    assert wide >= loads - 2
    # The first of the weight is on its way before the program waits for the kernel that makes its row.
    assert one.listing.index("LDG.E") < one.listing.index("ACQBULK") < one.listing.rindex("LDG.E")
    assert "PREEXIT" in one.listing
    few = compile_few_rows(tmp_path, depth, columns, is_gated=is_gated)
    assert_no_spills(few)
    assert "HGMMA.64x16x16" in few.listing
    assert all(".128" in copy for copy in re.findall(r"\bLDGSTS\.E[\w.]*", few.listing))


def test_older_chips_have_no_overlap(tmp_path: Path) -> None:
    """An A100 has no instruction for it."""
    padded, options = launch.row_tile(4096)
    constants = {"SIZE": 4096, "PADDED": padded}
    types = dict.fromkeys(("hidden_ptr", "delta_ptr"), "*bf16") | {"weight_ptr": "*fp32", "eps": "fp32"}
    arguments = (arithmetic.add_norm_kernel, constants, options, tmp_path, types)
    assert "ACQBULK" in compile_kernel(*arguments).listing
    assert "ACQBULK" not in compile_kernel(*arguments, target=GPUTarget("cuda", 80, 32)).listing
