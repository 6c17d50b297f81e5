"""Blocks of KV in the host's memory, and copies between them and the pool of the device.

    host        | block 0 | block 1 | ...            each bytes_per_block long, as `KvPool.staged` describes a row
    GPU         pool --gather--> staging --copy engine--> host        two lanes, each with a stream and a buffer
                pool <--scatter- staging <-copy engine--- host
    CPU         pool <--------------------------------------> host    one memory; numpy copies without the GIL

Copies are called from one thread beside the one that computes steps. They touch no block that a step writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from coppice.errors import UnavailableError
from coppice_worker.core.batch.step_batch import Int32
from coppice_worker.kernels.backend import Backend
from coppice_worker.kernels.host_memory import zeros_in_huge_pages
from coppice_worker.kernels.pool import KvPool

_STAGING_BYTES = 32 << 20  # of one lane: hundreds of microseconds of a PCIe link, so launches are hidden


class HostPool:
    """`num_blocks` blocks on the host for the blocks of one device pool. Raises UnavailableError."""

    def __init__(self, pool: KvPool, backend: Backend, num_blocks: int) -> None:
        self.bytes_per_block = pool.bytes_per_block
        self.blocks = zeros_in_huge_pages(num_blocks * pool.bytes_per_block).view(num_blocks, pool.bytes_per_block)
        if pool.storage.device.type == "cuda":
            _pin(self.blocks)
            lanes = _CudaLanes(pool.storage.device)
            self._copies: StagedCopies | _CpuCopies = StagedCopies(pool, backend, self.blocks, lanes)
        else:
            self._copies = _CpuCopies(pool, self.blocks)

    @torch.inference_mode()
    def demote(self, src: Int32, dst: Int32) -> None:
        """Copies blocks src [N] of the device to blocks dst [N] of the host; they are there when it returns."""
        assert src.shape == dst.shape
        self._copies.demote(src, dst)

    @torch.inference_mode()
    def promote(self, src: Int32, dst: Int32) -> None:
        """Copies blocks src [N] of the host to blocks dst [N] of the device; they are there when it returns."""
        assert src.shape == dst.shape
        self._copies.promote(src, dst)


class _CpuCopies:
    """Both tiers are memory of this process. Block by block, so the one thread that copies needs no other."""

    def __init__(self, pool: KvPool, blocks: torch.Tensor) -> None:
        # [planes, blocks, words] each, device and host side by side
        self._pairs: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = [
            (device.numpy(), host.numpy()) for device, host in zip(pool.planes(), pool.staged(blocks), strict=True)
        ]

    def demote(self, src: Int32, dst: Int32) -> None:
        for device, host in self._pairs:
            for one, other in zip(src.tolist(), dst.tolist(), strict=True):
                host[:, other] = device[:, one]

    def promote(self, src: Int32, dst: Int32) -> None:
        for device, host in self._pairs:
            for one, other in zip(src.tolist(), dst.tolist(), strict=True):
                device[:, other] = host[:, one]


class Lanes(Protocol):
    """Streams of the device that work beside each other, and beside the steps."""

    count: int

    def after_steps(self) -> None:
        """What is put into lanes from now on waits for all that steps have launched so far."""

    def lane(self, number: int) -> AbstractContextManager[None]:
        """What is launched inside goes into this lane."""

    def wait(self) -> None:
        """For all of them."""


class StagedCopies:
    """Lanes take turns: while the buffer of one crosses the link, that of the other is gathered or scattered."""

    def __init__(self, pool: KvPool, backend: Backend, blocks: torch.Tensor, lanes: Lanes) -> None:
        self._backend, self._blocks, self._lanes = backend, blocks, lanes
        self._lane_blocks = max(1, min(len(blocks), _STAGING_BYTES // pool.bytes_per_block))
        shape = (lanes.count, self._lane_blocks, pool.bytes_per_block)
        self._staging = torch.empty(shape, dtype=torch.uint8, device=pool.storage.device)
        # Kernels compile now and not when somebody waits for them. Block 0 of the device gets what it has.
        first = np.zeros(1, np.int32)
        self.demote(first, first)
        self.promote(first, first)

    def demote(self, src: Int32, dst: Int32) -> None:
        for staging, part in self._parts(len(src)):
            self._backend.gather_blocks(src[part], staging)
            for first, start, stop in runs(dst[part]):
                self._blocks[first : first + stop - start].copy_(staging[start:stop], non_blocking=True)
        self._lanes.wait()

    def promote(self, src: Int32, dst: Int32) -> None:
        for staging, part in self._parts(len(src)):
            for first, start, stop in runs(src[part]):
                staging[start:stop].copy_(self._blocks[first : first + stop - start], non_blocking=True)
            self._backend.scatter_blocks(staging, dst[part])
        self._lanes.wait()

    def _parts(self, count: int) -> Iterator[tuple[torch.Tensor, slice]]:
        """Parts of `count` blocks with a buffer for each, inside of its lane.

        Steps come first: the result of the one that wrote a block is known, but not that its last kernel has ended.
        """
        self._lanes.after_steps()
        for number, start in enumerate(range(0, count, self._lane_blocks)):
            stop = min(count, start + self._lane_blocks)
            with self._lanes.lane(number % self._lanes.count):
                yield self._staging[number % self._lanes.count, : stop - start], slice(start, stop)


class _CudaLanes:
    """Steps run on the device's default stream."""

    count = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(self.count)]  # type: ignore[no-untyped-call]

    def after_steps(self) -> None:
        for stream in self._streams:
            stream.wait_stream(torch.cuda.default_stream(self._device))

    def lane(self, number: int) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._streams[number])

    def wait(self) -> None:
        for stream in self._streams:
            stream.synchronize()


def runs(blocks: Int32) -> list[tuple[int, int, int]]:
    """(first block, start, stop) of each run of consecutive block ids [N], with start and stop as indices."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(blocks) != 1) + 1])
    stops = np.concatenate([starts[1:], [len(blocks)]])
    return [(int(blocks[start]), start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def _pin(blocks: torch.Tensor) -> None:
    """Has the device reach this memory by itself. torch's own pinned memory comes in powers of two."""
    status = torch.cuda.cudart().cudaHostRegister(blocks.data_ptr(), blocks.numel(), 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise UnavailableError(
            f"{blocks.numel() >> 20} MiB of the host's memory cannot be pinned: CUDA error {int(status)}",
            hint="choose a smaller --host-memory-mib, or raise the limit of locked memory (ulimit -l)",
        )
