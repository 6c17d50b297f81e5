"""All projections of a decoder on a CPU, one after the other: ours, with tiles and without, and those of torch.

    the stack    8 layers of hidden size 512 (qkv, output, gate and up, down) and a head of 32,000 tokens, 40M weights
    copies       each contender has several packed copies of it, more than caches hold, and takes the next one each
                 call: weights come from memory, as those of a model that no cache holds

Only products are computed, no gate, so all contenders do the same. With few rows the bound is reading the weights once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch

from coppice_bench.kernels.cases import CaseMaker, KernelCase
from coppice_bench.kernels.clocks import Kernel
from coppice_bench.report import note
from coppice_worker.kernels.backend import Projection
from coppice_worker.kernels.native.build import BuildError
from coppice_worker.kernels.native.packed import Packer, onednn_packs_bfloat16
from coppice_worker.model.decoder.linear import Projections

_CACHED_BYTES_MAX = 384 << 20  # of weights that some cache might hold between two calls of a contender
_ROWS = (1, 8, 32, 512)
_COPY_BOUND_ROWS_MAX = 32
_SPREAD = 0.02  # of weights

Project = Callable[[torch.Tensor], Projection]


@dataclass(frozen=True, slots=True)
class Stack:
    """Shapes of a decoder's projections; [out, in]."""

    layer: tuple[tuple[int, int], ...]
    num_layers: int
    head: tuple[int, int]

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return self.layer * self.num_layers + (self.head,)

    @property
    def num_weights(self) -> int:
        return sum(columns * depth for columns, depth in self.shapes)


_WHOLE = Stack(((768, 512), (512, 512), (3072, 512), (512, 1536)), 8, (32_000, 512))
_QUICK = Stack(((192, 128), (128, 128), (512, 128), (128, 256)), 1, (1_000, 128))


def projection_cases(device: torch.device, dtypes: tuple[torch.dtype, ...], *, quick: bool) -> list[CaseMaker]:
    """None where there is no compiler, and on other devices."""
    if device.type != "cpu":
        return []
    makers: list[CaseMaker] = []
    for dtype in dtypes:
        packers, left_out = _packers(dtype)
        if not packers:
            note(f"no projections of {dtype}: {left_out}")
            continue
        for rows in (1, 4) if quick else _ROWS:
            makers.append(partial(_make, _QUICK if quick else _WHOLE, dtype, rows, packers, left_out))
    return makers


def _packers(dtype: torch.dtype) -> tuple[dict[str, Packer], dict[str, str]]:
    """Ours, the quickest first, and why one is missing."""
    packers: dict[str, Packer] = {}
    left_out: dict[str, str] = {}
    for name in ("tiles", "without tiles") if dtype == torch.bfloat16 else ("without tiles",):
        try:
            packers[name] = Packer(dtype, tiles=name == "tiles")
        except BuildError as error:
            left_out[name] = str(error)
    return packers, left_out


def _make(
    stack: Stack, dtype: torch.dtype, num_rows: int, packers: dict[str, Packer], left_out: dict[str, str]
) -> KernelCase:
    weights = [torch.randn(shape).mul_(_SPREAD).to(dtype) for shape in stack.shapes]
    rows = {depth: torch.randn(num_rows, depth).to(dtype) for _, depth in stack.shapes}
    num_bytes = stack.num_weights * dtype.itemsize
    copies = 1 if stack is _QUICK else 1 + _CACHED_BYTES_MAX // num_bytes
    kernels = {name: _kernel(partial(packer.project, bias=None), weights, rows, copies)
               for name, packer in packers.items()}  # fmt: skip
    kernels[_name_of_torch(dtype)] = _kernel(
        lambda weight: Projections().project(weight.clone()), weights, rows, copies
    )
    ours = kernels.pop(next(iter(packers)))
    is_copy = num_rows <= _COPY_BOUND_ROWS_MAX
    return KernelCase(
        name=f"projections {stack.num_weights / 1e6:.0f}M x {num_rows}",
        dtype=dtype,
        bound="copy" if is_copy else "matmul",
        work=num_bytes if is_copy else 2.0 * stack.num_weights * num_rows,
        ours=ours,
        peers=kernels,
        left_out=left_out,
        comparable=frozenset(kernels),
    )


def _kernel(project: Project, weights: list[torch.Tensor], rows: dict[int, torch.Tensor], copies: int) -> Kernel:
    """All projections, each call those of the next copy; gives what the last one, the head, gives."""
    stacks = [[project(weight) for weight in weights] for _ in range(copies)]
    inputs = [rows[weight.shape[1]] for weight in weights]
    turn = count()

    def compute() -> torch.Tensor:
        for projection, some in zip(stacks[next(turn) % copies], inputs, strict=True):
            out = projection(some)
        return out

    return compute


def _name_of_torch(dtype: torch.dtype) -> str:
    """What a worker without kernels of ours takes; with what oneDNN is kept to, if anything."""
    if dtype != torch.bfloat16 or not onednn_packs_bfloat16():
        return "torch"
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA")
    return f"onednn {limit}" if limit else "onednn"
