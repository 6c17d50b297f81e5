"""Compiles kernels for sm_90 without a GPU, and reads what came out."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from coppice_worker.kernels.triton.residency import programs_beside

TARGET = GPUTarget("cuda", 90, 32)
SPILLS = re.compile(r"\b(LDL|STL)\b")  # reads and writes of a thread's stack
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

BF16 = ("query_ptr", "key_pool_ptr", "value_pool_ptr", "out_ptr", "key_ptr", "value_ptr", "planes_ptr")
FLOAT32 = ("partial_ptr", "lse_ptr")
# Arguments that the launches guarantee to be multiples of 16.
ALIGNED = ("query_stride", "key_stride", "value_stride", "width")


@dataclass(frozen=True, slots=True)
class Compiled:
    registers: int  # per thread
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    listing: str

    def programs_per_sm(self) -> int:
        return programs_beside(self.registers, self.shared_bytes, self.num_warps)


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


def _asked(target: GPUTarget) -> Callable[[], GPUTarget]:
    """Kernels ask for the chip that is there; here none is."""

    def current_target() -> GPUTarget:
        return target

    current_target.__triton_builtin__ = True  # type: ignore[attr-defined]  # else it is not for kernels
    return current_target


def compile_kernel(
    kernel: Any,
    constants: Mapping[str, Any],
    options: Mapping[str, Any],
    folder: Path,
    types: Mapping[str, str] | None = None,
    aligned_too: tuple[str, ...] = (),
    target: GPUTarget = TARGET,
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
    with patch("triton.language.target_info.current_target", _asked(target)):
        built = triton.compile(source, target=target, options=dict(options))
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
    assert not SPILLS.search(compiled.listing)


def assert_few_spills(compiled: Compiled, stack_bytes: int = 64) -> None:
    """What the largest variants leave on the stack is little, and is not waited for: under one in a hundred
    instructions of the loop over tiles reads or writes it."""
    assert compiled.stack_bytes <= stack_bytes
    loop = innermost_loop(compiled.listing)
    assert 100 * sum(SPILLS.search(line) is not None for line in loop) < len(loop)


def innermost_loop(listing: str) -> list[str]:
    """Instructions of the shortest loop that has matrix instructions, as a disassembly lists them."""
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    instructions: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", line):
            instructions.append(line)
            branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
            if branch and branch[1] in labels:
                loops.append(instructions[labels[branch[1]] :])
    return min((loop for loop in loops if any("HGMMA" in line for line in loop)), key=len)
