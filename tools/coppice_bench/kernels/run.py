"""Measures all cases of one device, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from coppice_bench.kernels.attention import attention_cases
from coppice_bench.kernels.cases import CaseMaker, KernelCase, largest_error
from coppice_bench.kernels.ceilings import Ceilings, measure_ceilings
from coppice_bench.kernels.clocks import Clock, clock_for
from coppice_bench.kernels.gpu_projections import few_rows_cases
from coppice_bench.kernels.projections import projection_cases
from coppice_bench.kernels.small import small_cases
from coppice_bench.report import describe_run, note, warn_if_busy

_ROUNDS = {"cuda": 30, "cpu": 24}
_QUICK_ROUNDS = 4
_BUDGET_S = 1.0  # of each contender, on a CPU


def run_kernels(*, quick: bool, threads: int | None = None) -> dict[str, Any]:
    """On the first CUDA device, or else on the CPU with `threads` threads."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    warn_if_busy()
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    dtypes = (torch.bfloat16,) if device.type == "cuda" else (torch.float32, torch.bfloat16)
    clock = clock_for(device, _QUICK_ROUNDS) if quick else clock_for(device, _ROUNDS[device.type], _BUDGET_S)
    with torch.inference_mode():
        note("ceilings: copying, multiplying")
        ceilings = measure_ceilings(device, dtypes, clock, quick=quick)
        makers = attention_cases(device, dtypes, quick=quick) + small_cases(device, dtypes, quick=quick)
        makers += few_rows_cases(device, dtypes, quick=quick)
        makers += projection_cases(device, dtypes, quick=quick)
        measured = dict(_measured(makers, ceilings, clock))
    return {
        "bench": "kernels",
        "copy_gb_per_s": ceilings.copy_bytes_per_s / 1e9,
        "matmul_tflop_per_s": {_name(dtype): rate / 1e12 for dtype, rate in ceilings.flops_per_s.items()},
        "kernels": measured,
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        **describe_run(),
    }


def _measured(makers: list[CaseMaker], ceilings: Ceilings, clock: Clock) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, make in enumerate(makers, 1):
        case = make()
        name = f"{case.name} {_name(case.dtype)}"
        note(f"{number}/{len(makers)} {name}")
        yield name, _measure(case, ceilings, clock)


def _measure(case: KernelCase, ceilings: Ceilings, clock: Clock) -> dict[str, Any]:
    """Time, its fraction of the ceiling, and the peers' times over ours."""
    errors = {name: largest_error(case.ours(), case.peers[name]()) for name in case.comparable & case.peers.keys()}
    times = clock.times_us({"ours": case.ours, **case.peers})
    ours = times.pop("ours")
    rate = ceilings.copy_bytes_per_s if case.bound == "copy" else ceilings.flops_per_s[case.dtype]
    return {
        "time_us": ours,
        "fraction": case.work / rate / (ours * 1e-6),
        "of": case.bound,
        "vs": {name: theirs / ours for name, theirs in times.items()},
        **({"error": errors} if errors else {}),
        **({"left_out": case.left_out} if case.left_out else {}),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
