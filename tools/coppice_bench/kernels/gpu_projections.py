"""Projections of few rows on a GPU, beside torch's `linear`, which asks cuBLAS: what reads a weight once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, product

import torch
from torch.nn.functional import linear

from coppice_bench.kernels.cases import CaseMaker, KernelCase
from coppice_bench.kernels.clocks import Kernel
from coppice_worker.kernels.backend import Arithmetic

ROWS = (1, 2, 8, 16)
_TURNS = 4  # weights that take turns, so that no cache holds them all
_SPREAD = 0.02  # of random weights


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows [T, depth] -> [T, columns]; a gated one has gate and up, both of so many columns."""

    name: str
    columns: int
    depth: int
    is_gated: bool = False


# Llama 3.1 8B
SHAPES = (
    Shape("qkv", 6144, 4096),
    Shape("output", 4096, 4096),
    Shape("gate, up", 14336, 4096, is_gated=True),
    Shape("down", 4096, 14336),
    Shape("head", 128_256, 4096),
)


def few_rows_cases(device: torch.device, dtypes: tuple[torch.dtype, ...], *, quick: bool) -> list[CaseMaker]:
    """None but on CUDA."""
    if device.type != "cuda":
        return []
    shapes, rows = (SHAPES[:3], ROWS[:2]) if quick else (SHAPES, ROWS)
    return [partial(few_rows_case, device, *case) for case in product(dtypes, shapes, rows)]


def few_rows_case(device: torch.device, dtype: torch.dtype, shape: Shape, num_rows: int) -> KernelCase:
    # Imported here, as a machine without a GPU need not have Triton.
    from coppice_worker.kernels.triton.arithmetic import TritonArithmetic
    from coppice_worker.kernels.triton.few_rows import FewRows

    arithmetic = TritonArithmetic()
    ours = FewRows(dtype, arithmetic)
    halves = 2 if shape.is_gated else 1
    weights = [
        torch.empty(halves * shape.columns, shape.depth, dtype=dtype, device=device).normal_(0, _SPREAD)
        for _ in range(_TURNS)
    ]
    rows = torch.randn(num_rows, shape.depth, device=device).to(dtype)
    projections = [ours.gated(one, None, "silu") if shape.is_gated else ours.project(one, None) for one in weights]
    moved = weights[0].nbytes + rows.nbytes + num_rows * shape.columns * dtype.itemsize
    return KernelCase(
        name=f"{shape.name} {num_rows} x {shape.depth} -> {shape.columns}",
        dtype=dtype,
        bound="copy",
        work=moved,
        ours=_in_turn([partial(projection, rows) for projection in projections]),
        peers={"linear": _in_turn([_by_torch(rows, one, arithmetic, is_gated=shape.is_gated) for one in weights])},
        comparable=frozenset({"linear"}),
    )


def _by_torch(rows: torch.Tensor, weight: torch.Tensor, arithmetic: Arithmetic, *, is_gated: bool) -> Kernel:
    """The gate behind it is ours, as in a step of more rows."""
    if is_gated:
        return lambda: arithmetic.gate(linear(rows, weight), "silu")
    return lambda: linear(rows, weight)


def _in_turn(calls: list[Callable[[], object]]) -> Kernel:
    turn = count()
    return lambda: calls[next(turn) % len(calls)]()
