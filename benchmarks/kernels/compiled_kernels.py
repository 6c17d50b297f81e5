"""What kernels take of an sm_90 multiprocessor as the installed Triton compiles them; needs no GPU.

    python -m benchmarks.kernels.compiled_kernels [--json]
    make test-compilers                       the compile tests, and this, with each Triton that people have

Attention is of 8 KV heads with 4 query heads each, blocks of 16; projections are of an 8B model. `beside` is how many
programs fit beside each other on a multiprocessor; `launched`, of decode, how many are where no device is asked; on a
device it is what its compiler left room for. `spills` are instructions that read or write a thread's stack.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import triton

from coppice_bench.report import describe_run, print_report
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.residency import read_programs
from tests.kernels.compiled.sm90 import SPILLS, Compiled
from tests.kernels.compiled.test_compile_decode import compile_decode
from tests.kernels.compiled.test_compile_extend import compile_extend
from tests.kernels.compiled.test_compile_small import compile_few_rows, compile_one_row

HEAD_DIMS, GROUP, BLOCK_SIZE = (64, 96, 128, 256), 4, 16
# Depth, columns, whether it is gate and up: qkv, gate and up, down of Llama 3.1 8B.
PROJECTIONS = ((4096, 6144, False), (4096, 14336, True), (14336, 4096, False))
Found = Iterator[tuple[str, dict[str, int]]]


def decode_kernels(folder: Path) -> Found:
    for head_dim in HEAD_DIMS:
        for has_float8 in (False, True):
            read = read_programs(head_dim, has_float8)
            for members, launched in ((1, read.own), (launch.prefix_members(GROUP), read.shared)):
                compiled = compile_decode(
                    folder, head_dim, BLOCK_SIZE, group=GROUP, members=members, has_float8=has_float8
                )
                kind = "decode" if members == 1 else "common prefix"
                name = f"{kind} {head_dim} {'float8' if has_float8 else 'bfloat16'}"
                yield name, {**taken(compiled), "launched": launched}


def extend_kernels(folder: Path) -> Found:
    for head_dim in HEAD_DIMS:
        for name, blocks in (("bfloat16", torch.bfloat16), ("float8", torch.float8_e4m3fn)):
            yield f"extend {head_dim} {name}", taken(compile_extend(folder, head_dim, BLOCK_SIZE, blocks=blocks))


def projections(folder: Path) -> Found:
    for depth, columns, is_gated in PROJECTIONS:
        name = f"{columns} x {depth}{' gated' if is_gated else ''} bfloat16"
        yield f"one row {name}", taken(compile_one_row(folder, depth, is_gated=is_gated))
        yield f"few rows {name}", taken(compile_few_rows(folder, depth, columns, is_gated=is_gated))


def taken(compiled: Compiled) -> dict[str, int]:
    """Registers a thread, bytes of its stack, spills; warps and KiB of shared memory of a program; programs."""
    return {
        "registers": compiled.registers,
        "stack_bytes": compiled.stack_bytes,
        "spills": len(SPILLS.findall(compiled.listing)),
        "warps": compiled.num_warps,
        "shared_kib": compiled.shared_bytes // 1024,
        "beside": compiled.programs_per_sm(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coppice-compiled-") as name:
        folder = Path(name)
        found = {**dict(decode_kernels(folder)), **dict(extend_kernels(folder)), **dict(projections(folder))}
    print_report(
        {"bench": "compiled_kernels", "compiler": f"triton {triton.__version__}", "kernels": found, **describe_run()},
        as_json=arguments.json,
    )
    # A second wave, in which most of the device waits.
    return int(any(kernel["beside"] < kernel.get("launched", 1) for kernel in found.values()))


if __name__ == "__main__":
    sys.exit(main())
