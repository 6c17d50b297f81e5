"""What the kernels of decode take of an sm_90 multiprocessor as the installed Triton compiles them; needs no GPU.

    python -m benchmarks.compiled_kernels [--json]
    make test-compilers                       the compile tests, and this, with each Triton that people have

Of 8 KV heads with 4 query heads each, blocks of 16. `beside` is how many programs fit beside each other on a
multiprocessor, `launched` how many are where no device is asked; on a device it is what its compiler left room for.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import triton

from coppice_bench.report import describe_run, print_report
from coppice_worker.kernels.triton import launch
from coppice_worker.kernels.triton.residency import read_programs
from tests.kernels.compiled.test_compile_decode import compile_decode

HEAD_DIMS, GROUP, BLOCK_SIZE = (64, 96, 128, 256), 4, 16


def measured(folder: Path, head_dim: int, members: int, has_float8: bool) -> dict[str, int]:
    compiled = compile_decode(folder, head_dim, BLOCK_SIZE, group=GROUP, members=members, has_float8=has_float8)
    read = read_programs(head_dim, has_float8)
    return {
        "registers": compiled.registers,
        "stack_bytes": compiled.stack_bytes,
        "shared_kib": compiled.shared_bytes // 1024,
        "beside": compiled.programs_per_sm(),
        "launched": read.own if members == 1 else read.shared,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(prefix="coppice-compiled-") as folder:
        for head_dim in HEAD_DIMS:
            for has_float8 in (False, True):
                for members in (1, launch.prefix_members(GROUP)):
                    kind = "decode" if members == 1 else "common prefix"
                    name = f"{kind} {head_dim} {'float8' if has_float8 else 'bfloat16'}"
                    found[name] = measured(Path(folder), head_dim, members, has_float8)
    print_report(
        {"bench": "compiled_kernels", "compiler": f"triton {triton.__version__}", "kernels": found, **describe_run()},
        as_json=arguments.json,
    )
    # A second wave, in which most of the device waits.
    return int(any(kernel["beside"] < kernel["launched"] for kernel in found.values()))


if __name__ == "__main__":
    sys.exit(main())
