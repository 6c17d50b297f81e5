"""Compiles the kernels for sm_90 without a GPU: no stack, no spills, the wanted instructions, enough occupancy."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs the Triton compiler, not its interpreter", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coppice_worker.kernels.triton import decode, extend, launch

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS_PER_SM = 65536
SHARED_BYTES_PER_SM = 227 * 1024

pytestmark = pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this Triton has no CUDA tools")

BF16 = ("query_ptr", "key_pool_ptr", "value_pool_ptr", "out_ptr", "key_ptr", "value_ptr", "planes_ptr")
FLOAT32 = ("partial_ptr", "lse_ptr")
# Arguments that the launches guarantee to be multiples of 16.
ALIGNED = ("query_stride", "key_stride", "value_stride", "width", "split_tokens")


@dataclass(frozen=True, slots=True)
class Compiled:
    registers: int  # per thread
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    listing: str

    def programs_per_sm(self) -> int:
        # A warp takes its registers in units of 8 per thread, a program keeps 1 KiB of shared memory for itself.
        per_program = self.num_warps * 32 * -(-self.registers // 8) * 8
        return min(REGISTERS_PER_SM // per_program, SHARED_BYTES_PER_SM // (self.shared_bytes + 1024))


def type_of(name: str) -> str:
    if name in BF16:
        return "*bf16"
    if name in FLOAT32:
        return "*fp32"
    if name == "slots_ptr":
        return "*i64"
    if name.endswith("_ptr"):
        return "*i32"
    return "fp32" if name == "scale_log2" else "i32"


def compile_kernel(
    kernel: Any,
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    folder: Path,
    types: Mapping[str, str] | None = None,
    aligned_too: tuple[str, ...] = (),
) -> Compiled:
    """`types` and `aligned_too` tell of arguments that `type_of` and ALIGNED do not know; a constant None stands for
    no array."""
    names = kernel.arg_names
    known = types or {}
    signature = {name: "constexpr" if name in constants else known.get(name) or type_of(name) for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in (*ALIGNED, *aligned_too)]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(options))
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(built.asm["cubin"])
    usage = run_tool("cuobjdump", "-res-usage", cubin)
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    assert numbers["LOCAL"] == 0
    return Compiled(
        numbers["REG"],
        numbers["STACK"],
        built.metadata.shared,
        built.metadata.num_warps,
        run_tool("nvdisasm", cubin),
    )


def run_tool(tool: str, *arguments: str | Path) -> str:
    command = [str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def assert_no_spills(compiled: Compiled) -> None:
    assert compiled.stack_bytes == 0
    assert not re.search(r"\b(LDL|STL)\b", compiled.listing)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode(head_dim: int, block_size: int, tmp_path: Path) -> None:
    constants = {"NUM_KV_HEADS": 8, "GROUP": 4, "GROUP_PADDED": 16, "HEAD_DIM": head_dim, "HEAD_PADDED": head_dim}
    tiles = {"BLOCK_SIZE": block_size, "TILE": launch.DECODE_TILE}
    compiled = compile_kernel(decode.decode_kernel, {**constants, **tiles}, launch.DECODE_OPTIONS, tmp_path)
    assert_no_spills(compiled)
    assert compiled.programs_per_sm() >= launch.DECODE_PROGRAMS_PER_SM
    # Warp-group matrix instructions, and K and V copied to shared memory behind the arithmetic.
    assert "HGMMA" in compiled.listing
    assert "LDGSTS" in compiled.listing


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


def test_small_kernels(tmp_path: Path) -> None:
    splits = {"HEAD_DIM": 128, "HEAD_PADDED": 128, "SPLITS": launch.REDUCE_SPLITS}
    compiled = compile_kernel(decode.reduce_kernel, splits, launch.COMMON_OPTIONS, tmp_path)
    assert_no_spills(compiled)
    assert compiled.programs_per_sm() >= 8
