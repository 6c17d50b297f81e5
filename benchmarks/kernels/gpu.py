"""Everything that wants a GPU, in one go: is it right, how fast is it, and how far from what is wanted.

    make gpu                        or: python -m benchmarks.kernels.gpu [--out FOLDER] [--only correct,measure,again]

    correct    tests of kernels, copies, graphs and ranks; memory and races by compute-sanitizer, where it is installed
    measure    kernels beside copying, multiplying and the peers that are installed; whole steps beside their floor
    again      the kernels once more: what differs by more than a few percent was not measured

Each part has a time limit, and what it found is written when it ends, so that a session that is cut off loses one part.
FOLDER (build/gpu) keeps results and logs, and Triton's cache for the next time. Without a GPU the parts that need none
run, and the others are named. The exit code is 1 where a part failed, or where there are GPUs and torch finds none.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from coppice_bench.report import describe_run, note

TESTS = "tests/kernels/gpu"
TESTS_OF_COPIES = ("tests/kernels/test_host_pool.py", "tests/kernels/test_upload.py")  # between device and host
# Images with torch may have plugins that warn, and torch warns once of its own debugging.
PYTEST = (sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "-W", "default")
MANY = ("-n", str(min(12, os.cpu_count() or 1)))
BENCH = (sys.executable, "-m", "coppice_cli", "bench")
GPU_QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,memory.total"
# Of an H200; see docs/BENCHMARKS.md. Kernels by their names, without the type; others have none.
LEAST_FRACTIONS = {
    "decode 64 x 4096": 0.92,
    "decode fp8 64 x 4096": 0.80,
    "prefill 2048 after 6144": 0.60,
    "prefill 8192": 0.60,
    "prefill 4 x 2048 after 8192": 0.60,
    "rotate, write 8192": 0.85,
    "copy 1024 blocks": 0.85,
    "add, norm 8192 x 4096": 0.85,
}
LONGEST_US = {"decode 8 x 4096": 42.0, "decode 1 x 32768": 44.0}
# Lengths that differ reach so much of the fraction of lengths that do not.
RAGGED, UNIFORM, RAGGED_SHARE = "decode ragged", "decode 64 x 4096", 0.90
STEP_TARGETS = {1: 0.75, 8: 0.80, 64: 0.80, 128: 0.80}
MIXED_HOST_MS = 0.5  # of a graph, until it is launched


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    of: str  # correct, measure or again
    command: tuple[str, ...]
    limit_s: int
    needs_gpus: int = 1
    program: str = ""  # that it needs
    is_json: bool = False  # its output is a line of JSON


def parts(num_gpus: int) -> list[Part]:
    several = [f"{TESTS}/test_gpu{name}.py" for name in ("", "_small", "_extend", "_decode")]
    of_one = (*PYTEST, "-p", "no:xdist")
    small, decode = (*of_one, several[1]), (*of_one, several[3])
    sanitizer = ("compute-sanitizer", "--error-exitcode", "1", "--tool")
    profiler = ("ncu", "--clock-control", "none", "--target-processes", "all", "--kernel-name", "regex:decode|reduce")
    compiled = (sys.executable, "-m", "benchmarks.kernels.compiled_kernels", "--json")
    size = () if num_gpus else ("--quick",)
    return [
        Part("compiled", "correct", compiled, 240, needs_gpus=0, is_json=True),
        Part("kernels", "correct", (*PYTEST, *MANY, *several, *TESTS_OF_COPIES), 240),
        Part("graphs", "correct", (*of_one, f"{TESTS}/test_gpu_executor.py"), 120),
        Part("ranks", "correct", (*of_one, f"{TESTS}/test_gpu_ranks.py"), 120, needs_gpus=2),
        Part("memcheck", "correct", (*sanitizer, "memcheck", *small), 180, program="compute-sanitizer"),
        Part("racecheck", "correct", (*sanitizer, "racecheck", *decode), 180, program="compute-sanitizer"),
        Part("bench_kernels", "measure", (*BENCH, "kernels", "--json", *size), 300, needs_gpus=0, is_json=True),
        Part("bench_step", "measure", (*BENCH, "step", "--json", *size), 300, needs_gpus=0, is_json=True),
        Part("profile", "measure", (*profiler, *decode), 120, program="ncu"),
        Part("bench_kernels_again", "again", (*BENCH, "kernels", "--json"), 300, is_json=True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu"), help="folder of results, logs and Triton's cache"
    )
    parser.add_argument("--only", default="correct,measure,again", help="which of correct, measure, again")
    arguments = parser.parse_args()
    wanted = set(arguments.only.split(","))
    if not wanted <= {"correct", "measure", "again"}:
        parser.error(f"--only {arguments.only}: give some of correct, measure, again")
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    device = describe_device()
    num_gpus = device["num_gpus"]
    note(f"GPUs: {device['gpus'] or num_gpus}")
    found: dict[str, Any] = {"bench": "gpu", "device": device, "parts": {}, **describe_run()}
    for part in parts(num_gpus):
        if part.of in wanted:
            found["parts"][part.name] = run(part, out, num_gpus)
            (out / "results.json").write_text(json.dumps(found) + "\n")
    print(table(found["parts"]))
    print(f"results and logs: {out}")
    has_failed = any(part["state"] in ("failed", "too long") for part in found["parts"].values())
    return int(has_failed or (bool(device["gpus"]) and not num_gpus))


def describe_device() -> dict[str, Any]:
    """How many GPUs torch finds, what nvidia-smi tells of each, and which peers of our kernels are installed."""
    gpus: list[dict[str, str]] = []
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        names = GPU_QUERY.split(",")
        rows = done.stdout.splitlines() if done.returncode == 0 else []
        gpus = [dict(zip(names, map(str.strip, row.split(",")), strict=False)) for row in rows]
    peers = [name for name in ("flashinfer", "flash_attn_interface", "flash_attn") if importlib.util.find_spec(name)]
    if gpus and not torch.cuda.is_available():
        note(f"torch {torch.__version__} finds none of {len(gpus)} GPUs: is it a build for CPUs?")
    return {"num_gpus": torch.cuda.device_count(), "gpus": gpus, "peers": peers}


def run(part: Part, out: Path, num_gpus: int) -> dict[str, Any]:
    left_out = why_not(part, num_gpus)
    if left_out:
        note(f"{part.name}: left out: {left_out}")
        return {"state": "left out", "why": left_out}
    note(f"{part.name}: up to {part.limit_s} s; log: {out / part.name}.log")
    environment = {**os.environ, "TRITON_CACHE_DIR": str((out / "triton-cache").resolve())}
    began_s = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(
            part.command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
        )
        try:
            said, _ = process.communicate(timeout=part.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its children, too: they would keep the GPU
            log.write(process.communicate()[0])
            note(f"{part.name}: took longer than {part.limit_s} s")
            return {"state": "too long", "seconds": part.limit_s}
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        log.write(said)
    seconds = round(time.monotonic() - began_s, 1)
    last = said.strip().splitlines()[-1:] or [""]
    note(f"{part.name}: {'well' if process.returncode == 0 else f'exit code {process.returncode}'} after {seconds} s")
    result: dict[str, Any] = {"state": "well" if process.returncode == 0 else "failed", "seconds": seconds}
    if part.is_json and last[0].startswith("{"):
        return {**result, "found": json.loads(last[0])}
    return {**result, "said": last[0][-500:]}


def why_not(part: Part, num_gpus: int) -> str:
    """Why it cannot run here; empty where it can."""
    if num_gpus < part.needs_gpus:
        return "no GPU" if not num_gpus else f"needs {part.needs_gpus} GPUs"
    if part.program and not shutil.which(part.program):
        return f"{part.program} is not installed"
    return ""


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Times and fractions beside what is wanted, and how each part ended."""
    rows: list[Sequence[str]] = [("", "took", "fraction", "of", "wanted", "others / ours")]
    for name in ("bench_kernels", "bench_kernels_again"):
        measured = found.get(name, {}).get("found", {})
        if measured.get("device", "cpu") != "cpu":
            rows += [_kernel_row(kernel, measured["kernels"]) for kernel in measured["kernels"]]
    steps = found.get("bench_step", {}).get("found", {})
    if steps and steps["device"]["kind"] != "cpu":
        rows += [_step_row(row) for row in steps["decode"] if "fraction_of_floor" in row]
        rows += [cells for row in steps["mixed"] if "graph" in row for cells in _mixed_rows(row)]
    lines = []
    if len(rows) > 1:
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    states = [f"{name}: {part['state']}{': ' + part['why'] if 'why' in part else ''}" for name, part in found.items()]
    return "\n".join([*lines, *states])


def _kernel_row(name: str, kernels: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    measured = kernels[name]
    others = ", ".join(f"{peer} {ratio:.2f}" for peer, ratio in measured["vs"].items())
    fraction = f"{measured['fraction']:.2f}"
    return (name, f"{measured['time_us']:.1f} us", fraction, measured["of"], _wanted_of(name, kernels), others)


def _wanted_of(name: str, kernels: Mapping[str, Mapping[str, Any]]) -> str:
    """Of a kernel at one size; empty where nothing is."""
    load, _, dtype = name.rpartition(" ")
    if load in LONGEST_US:
        return f"<= {LONGEST_US[load]:.0f} us"
    if load == RAGGED and f"{UNIFORM} {dtype}" in kernels:
        return _least(RAGGED_SHARE * kernels[f"{UNIFORM} {dtype}"]["fraction"])
    return _least(LEAST_FRACTIONS.get(load))


def _step_row(row: Mapping[str, Any]) -> Sequence[str]:
    name, took = f"step of {row['batch']}, {row['dtype']}", f"{row['step_ms']:.2f} ms"
    return (name, took, f"{row['fraction_of_floor']:.2f}", "floor", _least(STEP_TARGETS.get(row["batch"])), "")


def _mixed_rows(row: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """The host's time for it, and its own; beside launches one by one."""
    name = f"step of {row['new_tokens']} new beside {row['decodes']}, {row['dtype']}"
    graph, eager = row["graph"], row["eager"]
    return [
        (label, f"{graph[part]:.2f} ms", "", "", wanted, f"one by one {eager[part] / graph[part]:.2f}")
        for label, part, wanted in (
            (f"host of a {name}", "host_ms", f"<= {MIXED_HOST_MS} ms"),
            (name, "step_ms", ""),
        )
    ]


def _least(fraction: float | None) -> str:
    return "" if fraction is None else f">= {fraction:.2f}"


if __name__ == "__main__":
    sys.exit(main())
