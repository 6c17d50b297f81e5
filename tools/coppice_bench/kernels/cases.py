"""A kernel at one size: what it must move or multiply, ours, and others that do the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from coppice_bench.kernels.clocks import Kernel

Bound = Literal["copy", "matmul"]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """`work` is bytes (bound by copying) or floating-point operations (bound by multiplying) that none can avoid."""

    name: str
    dtype: torch.dtype
    bound: Bound
    work: float
    ours: Kernel
    peers: dict[str, Kernel] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    # Peers whose results are compared with ours, as both are tensors of one shape.
    comparable: frozenset[str] = frozenset()


# Cases are made one at a time: at full size each takes gigabytes.
CaseMaker = Callable[[], KernelCase]


def largest_error(ours: Any, theirs: Any) -> float:
    """Norm of the difference over the norm of theirs."""
    wanted = theirs.double()
    return float((ours.double() - wanted).norm() / wanted.norm())
