"""What the device can do, measured in the same run: copying memory, and multiplying matrices of random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch

from coppice_bench.kernels.clocks import Clock, Kernel

_COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
_MATRIX = {"cuda": 8192, "cpu": 1024}
_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates that nothing on the device exceeds by much."""

    copy_bytes_per_s: float  # read and written together
    flops_per_s: dict[torch.dtype, float]


def measure_ceilings(device: torch.device, dtypes: Sequence[torch.dtype], clock: Clock, *, quick: bool) -> Ceilings:
    size = _COPY_BYTES[device.type] // (8 if quick else 1)
    source, target = (torch.ones(size // 4, dtype=torch.float32, device=device) for _ in range(2))
    # A copy in a CUDA graph takes half as long again on an H200 as a kernel that reads and writes the same.
    copies: dict[str, Kernel] = {
        "copy": lambda: target.copy_(source),
        "negation": lambda: torch.neg(source, out=target),
    }
    copy_us = min(clock.times_us(copies).values())
    side = _MATRIX[device.type] // (2 if quick else 1)
    flops = {}
    for dtype in dtypes:
        pairs = [[torch.randn(side, side, device=device).to(dtype) for _ in range(2)] for _ in range(_BUFFERS)]
        flops[dtype] = 2 * side**3 / (clock.times_us({"matmul": _products(pairs)})["matmul"] * 1e-6)
    return Ceilings(2 * size / (copy_us * 1e-6), flops)


def _products(pairs: list[list[torch.Tensor]]) -> Kernel:
    turn = count()
    return lambda: torch.mm(*pairs[next(turn) % len(pairs)])
