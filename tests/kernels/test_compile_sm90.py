"""The kernels as they are compiled for sm_90: no stack, no spills, the wanted instructions, enough occupancy."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs the Triton compiler, not its interpreter", allow_module_level=True)

from coppice_worker.kernels.triton import extend, launch
from tests.kernels.sm90 import TOOLS, assert_no_spills, compile_kernel

pytestmark = pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this Triton has no CUDA tools")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_extend(head_dim: int, tmp_path: Path) -> None:
    constants = {"NUM_KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": head_dim, "HEAD_PADDED": head_dim, "BLOCK_SIZE": 16}
    tiles = {"ROWS": launch.EXTEND_ROWS, "TILE": launch.EXTEND_TILE}
    options = launch.extend_options(head_dim)
    compiled = compile_kernel(extend.extend_kernel, {**constants, **tiles}, options, tmp_path)
    assert_no_spills(compiled)
    assert compiled.programs_per_sm() >= 1
    assert "HGMMA" in compiled.listing
    assert "LDGSTS" in compiled.listing
