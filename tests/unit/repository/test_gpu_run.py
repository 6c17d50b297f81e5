"""`make gpu`: what it leaves out and says so, what it keeps of parts that fail, and fractions beside what is wanted."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.kernels.gpu import LEAST_FRACTIONS, LONGEST_US, RAGGED, UNIFORM, Part, parts, run, table, why_not
from coppice_bench.kernels.attention import FLOAT8_LOAD, attention_loads
from scripts.metrics_reference import ROOT
from tests.fakes.waiting import wait_for

PYTHON = (sys.executable, "-c")


def test_without_a_gpu_parts_that_need_one_are_named() -> None:
    left_out = {part.name: why_not(part, 0) for part in parts(0)}
    assert {name for name, why in left_out.items() if not why} == {"compiled", "bench_kernels", "bench_step"}
    assert {why for why in left_out.values() if why} == {"no GPU"}


def test_a_program_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    found = {part.name: why_not(part, 1) for part in parts(1)}
    assert found["memcheck"] == "compute-sanitizer is not installed"
    assert found["profile"] == "ncu is not installed"
    assert found["ranks"] == "needs 2 GPUs"
    assert found["kernels"] == ""


def test_every_file_with_a_test_that_wants_a_gpu_is_named_and_no_other() -> None:
    named = {ROOT / word for part in parts(2) for word in part.command if word.startswith("tests/")}
    files = (ROOT / "tests" / "kernels").rglob("test_*.py")
    wanting = {path for path in files if "pytest.mark.gpu" in path.read_text()}
    assert wanting
    assert named == wanting


def part(code: str, **more: object) -> Part:
    return replace(Part("one", "correct", (*PYTHON, code), 60, needs_gpus=0), **more)  # type: ignore[arg-type]


def test_what_a_part_said_is_kept(tmp_path: Path) -> None:
    ended = run(part("print('7 passed'); raise SystemExit(1)"), tmp_path, 0)
    assert (ended["state"], ended["said"]) == ("failed", "7 passed")
    assert (tmp_path / "one.log").read_text().split() == ["7", "passed"]
    ended = run(part("import json; print('a note'); print(json.dumps({'fraction': 1}))", is_json=True), tmp_path, 0)
    assert (ended["state"], ended["found"]) == ("well", {"fraction": 1})


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """With what it has started."""
    code = (
        "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); subprocess.run(['sleep', '600'])"
    )
    ended = run(part(code, limit_s=2), tmp_path, 0)
    assert ended == {"state": "too long", "seconds": 2}
    grandchild = int((tmp_path / "one.log").read_text())
    wait_for(lambda: not Path(f"/proc/{grandchild}").exists() or is_zombie(grandchild), "its end")


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def kernel(fraction: float, **vs: float) -> dict[str, object]:
    return {"time_us": 41.44, "fraction": fraction, "of": "copy", "vs": vs}


def test_times_and_fractions_stand_beside_what_is_wanted() -> None:
    kernels = {
        "decode 64 x 4096 bfloat16": kernel(0.9312, flashinfer=1.31),
        "decode 8 x 4096 bfloat16": kernel(0.767),
        "decode ragged bfloat16": kernel(0.91),
        "decode 64 x 4096, 3584 shared bfloat16": kernel(0.484),
        "decode fp8 64 x 4096 bfloat16": kernel(0.7),
        "zero 256 blocks bfloat16": kernel(0.8),
    }
    steps = [
        {"batch": 1, "dtype": "bfloat16", "step_ms": 4.3, "fraction_of_floor": 0.71},
        {"batch": 8, "skipped": "no memory"},
    ]
    one, other = {"step_ms": 11.7, "host_ms": 0.806}, {"step_ms": 16.8, "host_ms": 14.9}
    mixed = [
        {"dtype": "bfloat16", "new_tokens": 64, "decodes": 32, "graph": one, "eager": other},
        {"dtype": "bfloat16", "new_tokens": 256, "decodes": 128, "skipped": "no memory"},
    ]
    found = {"device": {"kind": "NVIDIA H200"}, "decode": steps, "mixed": mixed}
    lines = table(
        {
            "bench_kernels": {"state": "well", "found": {"device": "NVIDIA H200", "kernels": kernels}},
            "bench_step": {"state": "well", "found": found},
            "ranks": {"state": "left out", "why": "needs 2 GPUs"},
        }
    ).splitlines()
    assert [re.split(r"  +", line) for line in lines[1:-3]] == [
        ["decode 64 x 4096 bfloat16", "41.4 us", "0.93", "copy", ">= 0.92", "flashinfer 1.31"],
        ["decode 8 x 4096 bfloat16", "41.4 us", "0.77", "copy", "<= 42 us"],
        ["decode ragged bfloat16", "41.4 us", "0.91", "copy", ">= 0.84"],
        ["decode 64 x 4096, 3584 shared bfloat16", "41.4 us", "0.48", "copy"],
        ["decode fp8 64 x 4096 bfloat16", "41.4 us", "0.70", "copy", ">= 0.80"],
        ["zero 256 blocks bfloat16", "41.4 us", "0.80", "copy"],
        ["step of 1, bfloat16", "4.30 ms", "0.71", "floor", ">= 0.75"],
        ["host of a step of 64 new beside 32, bfloat16", "0.81 ms", "<= 0.5 ms", "one by one 18.49"],
        ["step of 64 new beside 32, bfloat16", "11.70 ms", "one by one 1.44"],
    ]
    assert lines[-1] == "ranks: left out: needs 2 GPUs"


def test_what_is_wanted_is_of_loads_that_are_measured() -> None:
    loads = {load.name for load in attention_loads(on_chip=True, quick=False)} | {FLOAT8_LOAD.name}
    wanted = {name for name in (*LEAST_FRACTIONS, *LONGEST_US, RAGGED, UNIFORM) if name.startswith(("dec", "pre"))}
    assert wanted <= loads
