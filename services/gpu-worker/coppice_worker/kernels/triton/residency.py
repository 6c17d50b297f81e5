"""How many programs of a kernel run on a multiprocessor at a time, by what their compiled form takes.

    compilers differ     bf16 decode, 128 columns: 118 registers a thread with Triton 3.7, 139 with 3.6
    spans are equal      one program too many is a second wave, in which most of the device waits

So what was compiled is asked, where there is a device; elsewhere `launch` says what was read from listings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from coppice_worker.kernels.triton import launch

_REGISTERS_TOGETHER = 8  # a thread takes them in such units
_WARP = 32
_OWN_SHARED_BYTES = 1024  # that a program keeps for itself


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Of sm_90, unless it is said."""

    registers: int = 65536
    shared_bytes: int = 227 * 1024 + _OWN_SHARED_BYTES
    threads: int = 2048
    programs: int = 32


class DecodePrograms(NamedTuple):
    """On a multiprocessor at a time."""

    own: int  # each row for itself
    shared: int  # over what rows have in common


def programs_beside(
    registers: int, shared_bytes: int, num_warps: int, multiprocessor: Multiprocessor = Multiprocessor()
) -> int:
    """Of a kernel that takes so many registers a thread and so much shared memory a program."""
    threads = num_warps * _WARP
    per_program = threads * -(-registers // _REGISTERS_TOGETHER) * _REGISTERS_TOGETHER
    return min(
        multiprocessor.registers // per_program,
        multiprocessor.shared_bytes // (shared_bytes + _OWN_SHARED_BYTES),
        multiprocessor.threads // threads,
        multiprocessor.programs,
    )


def multiprocessor_of(device: torch.device) -> Multiprocessor:
    properties = torch.cuda.get_device_properties(device)
    return Multiprocessor(
        getattr(properties, "regs_per_multiprocessor", Multiprocessor().registers),  # older torch does not say it
        properties.shared_memory_per_multiprocessor,
        properties.max_threads_per_multi_processor,
    )


def read_programs(head_dim: int, has_float8: bool) -> DecodePrograms:
    """Of decode's kernels as listings have them, on the compilers of which there are some."""
    programs = launch.decode_programs_per_sm(head_dim, has_float8)
    return DecodePrograms(programs, programs)


def programs_of(kernel: Any, device: torch.device) -> int | None:
    """Of a kernel that a launch gave back; None where it does not say what it takes."""
    registers = getattr(kernel, "n_regs", None)
    if not registers:
        return None
    metadata = kernel.metadata
    return max(1, programs_beside(registers, metadata.shared, metadata.num_warps, multiprocessor_of(device)))
