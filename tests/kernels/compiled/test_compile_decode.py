"""Decode's kernels as they are compiled for sm_90: no stack, no spills, the wanted instructions, enough occupancy."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs the Triton compiler, not its interpreter", allow_module_level=True)

import triton.language as tl

from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.attention import decode
from coppice_worker.kernels.triton.attention import split_kv as spans
from tests.kernels.compiled.sm90 import TOOLS, Compiled, assert_few_spills, assert_no_spills, compile_kernel

pytestmark = pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this Triton has no CUDA tools")

FLOAT32 = ("shared_partial_ptr", "shared_lse_ptr", "sinks_ptr", "cap_log2")
TYPES = {name: "*fp32" if name.endswith("_ptr") else "fp32" for name in FLOAT32}


def compile_decode(
    folder: Path,
    head_dim: int,
    block_size: int,
    *,
    dtype: str = "bf16",
    group: int = 4,
    members: int = 1,
    has_float8: bool = False,
    is_windowed: bool = False,
) -> Compiled:
    """As `decode` launches it."""
    columns = launch.padded(members * group)
    constants = {
        "NUM_KV_HEADS": 8, "GROUP": group, "MEMBERS": members, "COLUMNS": columns, "HEAD_DIM": head_dim,
        "HEAD_PADDED": launch.padded(head_dim), "BLOCK_SIZE": block_size, "WINDOW": 4096 if is_windowed else 0,
        "CAPPED": is_windowed, "TILE": launch.DECODE_TILE,
        "COMPUTE": tl.float16 if has_float8 or dtype == "fp16" else tl.bfloat16,
        "firsts_ptr" if members > 1 else "members_ptr": None,
    }  # fmt: skip
    if not has_float8:
        constants |= {"key_scales_ptr": None, "value_scales_ptr": None}
    blocks = dict.fromkeys(("key_pool_ptr", "value_pool_ptr"), "*fp8e4nv" if has_float8 else f"*{dtype}")
    options = launch.decode_options(head_dim, members * group, has_float8)
    types = TYPES | blocks | {"query_ptr": f"*{dtype}"}
    return compile_kernel(decode.decode_kernel, constants, options, folder, types)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 16), (128, 64), (256, 32)])
def test_decode(head_dim: int, block_size: int, tmp_path: Path) -> None:
    compiled = compile_decode(tmp_path, head_dim, block_size, is_windowed=head_dim == 256)
    assert_no_spills(compiled)
    assert compiled.programs_per_sm() >= launch.decode_programs_per_sm(head_dim, False)
    # Warp-group matrix instructions, and K and V copied to shared memory, a tile ahead of what is waited for.
    assert "HGMMA" in compiled.listing
    assert re.search(r"LDGDEPBAR.*DEPBAR\.LE SB0, 0x[1-9]", compiled.listing, re.DOTALL)


def test_float8(tmp_path: Path) -> None:
    compiled = compile_decode(tmp_path, 128, 16, has_float8=True)
    assert_no_spills(compiled)
    assert compiled.programs_per_sm() >= launch.decode_programs_per_sm(128, True)
    # Two elements at a time, and none by way of float32; 16 bytes at a time to registers and to shared memory.
    assert not re.search(r"LDS\.[US](8|16)", compiled.listing)
    assert len(re.findall(r"LDG\.E\.128", compiled.listing)) >= 16
    assert "F2FP.F16.E4M3.UNPACK_B" in compiled.listing
    assert "HGMMA" in compiled.listing


def test_groups_of_rows(tmp_path: Path) -> None:
    compiled = compile_decode(tmp_path, 128, 16, members=launch.prefix_members(4))
    assert_no_spills(compiled)
    assert compiled.programs_per_sm() >= launch.decode_programs_per_sm(128, False)
    assert f"HGMMA.64x{launch.PREFIX_COLUMNS}x16" in compiled.listing


@pytest.mark.long
@pytest.mark.parametrize("has_float8", [False, True])
@pytest.mark.parametrize(("members", "is_windowed"), [(1, False), (1, True), (8, False)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_variant(head_dim: int, members: int, is_windowed: bool, has_float8: bool, tmp_path: Path) -> None:
    for block_size in (16, 32, 64):
        compiled = compile_decode(
            tmp_path, head_dim, block_size, members=members, has_float8=has_float8, is_windowed=is_windowed
        )
        if has_float8 and head_dim in (80, 96, 256):
            # Triton 3.9 leaves 72 to 128 bytes of this one, 3.7 nothing.
            assert_few_spills(compiled, stack_bytes=128 if head_dim == 256 and members > 1 else 64)
        else:
            assert_no_spills(compiled)
        if not is_windowed:  # there is a device where a cap may take a program's room, and it is asked
            assert compiled.programs_per_sm() >= launch.decode_programs_per_sm(head_dim, has_float8)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (7, 128), (32, 64), (64, 64), (64, 128)])
def test_groups(group: int, head_dim: int, dtype: str, tmp_path: Path) -> None:
    compiled = compile_decode(tmp_path, head_dim, 16, group=group, dtype=dtype)
    if (group, head_dim) == (64, 128):
        assert_few_spills(compiled)
    else:
        assert_no_spills(compiled)


def test_plan_and_reduce(tmp_path: Path) -> None:
    heads = {"NUM_KV_HEADS": 8, "MEMBERS": 16}
    splits = {"GROUP": 4, "HEAD_DIM": 128, "HEAD_PADDED": 128}
    tiles = {"WINDOW": 0, "TILE": launch.DECODE_TILE, "ROWS": launch.PLAN_ROWS}
    reduces = [launch.reduce_tile(264, units) for units in (2048, 64, 8)]
    for kernel, constants, options in (
        (spans.plan_kernel, tiles, launch.COMMON_OPTIONS),
        *((spans.reduce_kernel, {**splits, "PIECES": pieces}, options) for pieces, options in reduces),
    ):
        compiled = compile_kernel(kernel, heads | constants, options, tmp_path, TYPES)
        assert_no_spills(compiled)
        assert compiled.programs_per_sm() >= 8
