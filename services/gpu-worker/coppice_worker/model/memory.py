"""How many blocks a device has room for: what is left of its memory beside the weights and a largest step.

    |<------------------------------- total ------------------------------->|
    |<- others ->|<------------- utilization * total ------------->|
                 | weights | largest step | libraries | graphs | pool of blocks |

What others hold is counted once: it narrows the worker's share only where total - others is less than the share.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

from coppice.handles import BLOCKS_MAX
from coppice_worker.model.config.errors import PoolTooSmall

_GIB = 1 << 30
MORE_DEVICES = "more devices (--tensor-parallel)"


class DeviceMemory(Protocol):
    """Where readings come from. All in bytes."""

    def total_and_free(self) -> tuple[int, int]:
        """Of the device, whoever holds the rest."""

    def allocated(self) -> int:
        """By this process's tensors."""

    def allocated_peak(self) -> int:
        """Since the last `forget_peak`."""

    def reserved(self) -> int:
        """Held for this process's tensors, used or not."""

    def forget_peak(self) -> None: ...

    def release(self) -> None:
        """Gives back what is reserved and unused."""


class CudaMemory:
    """`DeviceMemory` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_and_free(self) -> tuple[int, int]:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total, free

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def allocated_peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        gc.collect()  # graphs and what they launch hold each other
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a worker needs beside its pool, in bytes."""

    total: int  # of the device
    free_before: int  # before this worker put anything there
    weights: int
    step: int  # a largest step, at its peak
    libraries: int  # contexts, workspaces and code, outside of torch's allocator
    graphs: int = 0

    def left_for_pool(self, utilization: float) -> int:
        """Negative where not even the rest fits."""
        share = min(int(self.total * utilization), self.free_before)
        return share - self.weights - self.step - self.libraries - self.graphs

    def describe(self, utilization: float) -> str:
        parts = (
            ("weights", self.weights),
            ("a largest step", self.step),
            ("libraries", self.libraries),
            ("graphs", self.graphs),
        )
        needs = ", ".join(f"{name} {_gib(num_bytes)}" for name, num_bytes in parts if num_bytes)
        of_share = f"{utilization:.2f} of {_gib(self.total)}"
        if self.free_before < int(self.total * utilization):
            of_share += f", of which only {_gib(self.free_before)} were free"
        return f"{of_share}, less {needs}"


@dataclass(frozen=True, slots=True)
class FillDevice:
    """A pool of as many blocks as the device has room for."""

    memory: DeviceMemory
    utilization: float = 0.9  # share of the device's memory that the worker may take in all
    num_blocks_max: int = BLOCKS_MAX


def measure(
    memory: DeviceMemory, free_before: int, largest_step: Callable[[], object], graphs: Callable[[], int] = lambda: 0
) -> MemoryUse:
    """With the weights loaded: what a step and what graphs (measured by themselves) take."""
    weights = memory.allocated()
    memory.forget_peak()
    largest_step()
    step = memory.allocated_peak() - weights
    total, free = memory.total_and_free()
    libraries = max(0, free_before - free - memory.reserved())
    memory.release()
    use = MemoryUse(total, free_before, weights, step, libraries, graphs())
    memory.release()
    return use


def graphs_bytes(memory: DeviceMemory, capture: Callable[[int], None], sizes: Sequence[int]) -> int:
    """Of graphs of all sizes. The largest and the next one are measured: the others share their memory, and are taken
    to need as much of their own as the second does."""
    free = [memory.total_and_free()[1]]
    for size in sorted(sizes, reverse=True)[:2]:
        capture(size)
        free.append(memory.total_and_free()[1])
    first, *second = (max(0, before - after) for before, after in pairwise(free))
    return first + sum(second) * (len(sizes) - 1)


def blocks_that_fit(use: MemoryUse, *, utilization: float, bytes_per_block: int, num_blocks_min: int) -> int:
    """Raises PoolTooSmall, which says how much is missing and what to change."""
    left = use.left_for_pool(utilization)
    wanted = num_blocks_min * bytes_per_block
    if left < wanted:
        raise PoolTooSmall(
            f"the device lacks {_gib(wanted - left)} for a pool of {num_blocks_min} blocks, the least that a largest "
            f"step needs: {use.describe(utilization)}",
            hint="use a smaller --max-step-tokens or --max-sequences, --kv-dtype fp8, a higher "
            f"--gpu-memory-utilization, or {MORE_DEVICES}",
        )
    return left // bytes_per_block


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
