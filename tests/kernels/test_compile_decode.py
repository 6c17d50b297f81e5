"""Decode's kernels as they are compiled for sm_90: no stack, no spills, the wanted instructions, enough occupancy."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs the Triton compiler, not its interpreter", allow_module_level=True)

import triton.language as tl

from coppice_worker.kernels.triton import decode, launch, spans
from tests.kernels.sm90 import TOOLS, Compiled, assert_no_spills, compile_kernel

pytestmark = pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this Triton has no CUDA tools")

FLOAT32 = ("shared_partial_ptr", "shared_lse_ptr", "sinks_ptr", "cap_log2")
TYPES = {name: "*fp32" if name.endswith("_ptr") else "fp32" for name in FLOAT32}


def compile_decode(folder: Path, head_dim: int, block_size: int, **others: Any) -> Compiled:
    constants = {
        **dict.fromkeys(("key_scales_ptr", "value_scales_ptr", "members_ptr")),
        "NUM_KV_HEADS": 8, "GROUP": 4, "MEMBERS": 1, "COLUMNS": 16, "HEAD_DIM": head_dim,
        "HEAD_PADDED": launch.padded(head_dim), "BLOCK_SIZE": block_size, "WINDOW": 0, "CAPPED": False,
        "TILE": launch.DECODE_TILE, "COMPUTE": tl.bfloat16,
    } | others  # fmt: skip
    return compile_kernel(decode.decode_kernel, constants, launch.DECODE_OPTIONS, folder, TYPES)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode(head_dim: int, block_size: int, tmp_path: Path) -> None:
    compiled = compile_decode(tmp_path, head_dim, block_size)
    assert_no_spills(compiled)
    assert compiled.programs_per_sm() >= launch.DECODE_PROGRAMS_PER_SM
    # Warp-group matrix instructions, and K and V copied to shared memory behind the arithmetic.
    assert "HGMMA" in compiled.listing
    assert "LDGSTS" in compiled.listing


def test_plan_and_reduce(tmp_path: Path) -> None:
    heads = {"NUM_KV_HEADS": 8, "MEMBERS": 16}
    splits = {"GROUP": 4, "HEAD_DIM": 128, "HEAD_PADDED": 128, "PIECES": launch.REDUCE_PIECES}
    tiles = {"WINDOW": 0, "TILE": launch.DECODE_TILE, "ROWS": launch.PLAN_ROWS}
    for kernel, constants, options in (
        (spans.plan_kernel, tiles, launch.COMMON_OPTIONS),
        (spans.reduce_kernel, splits, launch.REDUCE_OPTIONS),
    ):
        compiled = compile_kernel(kernel, heads | constants, options, tmp_path, TYPES)
        assert_no_spills(compiled)
        assert compiled.programs_per_sm() >= 8
