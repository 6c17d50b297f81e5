"""From the host to a device without waiting: memory that the device copies from by itself, used again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNED = 16  # bytes; kernels are compiled for addresses that are multiples of it


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


class HostBuffer:
    """Bytes on the host that are sent to a device; pinned, where there is a CUDA device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.array = self.memory.numpy()
        self._sent = new_event(device)

    def wait_until_sent(self) -> None:
        """Before it is written again."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, num_bytes: int, to: torch.Tensor) -> None:
        """Begins to copy its first bytes to the first of `to`."""
        to[:num_bytes].copy_(self.memory[:num_bytes], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class Upload:
    """Sends the arrays of a step in one copy. Two buffers take turns and grow as needed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._hosts = [HostBuffer(0, device), HostBuffer(0, device)]

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Tensors of the same shapes and types, in memory of their own."""
        starts = np.cumsum([0, *(aligned(array.nbytes) for array in arrays)]).tolist()
        host = self._next(starts[-1])
        sent = torch.empty(starts[-1], dtype=torch.uint8, device=self.device)
        found = []
        for array, start in zip(arrays, starts, strict=False):
            place = slice(start, start + array.nbytes)
            host.array[place].view(array.dtype).reshape(array.shape)[...] = array
            dtype = torch.from_numpy(array[:0]).dtype
            found.append(sent[place].view(dtype).view(array.shape))
        host.send(starts[-1], sent)
        return found

    def lend(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Like `send`, but on a CPU they are the arrays' own memory, which then must stay as it is."""
        return [torch.from_numpy(array) for array in arrays] if self.device.type == "cpu" else self.send(arrays)

    def _next(self, num_bytes: int) -> HostBuffer:
        self._hosts.reverse()
        if len(self._hosts[0].array) < num_bytes:
            self._hosts[0].wait_until_sent()
            self._hosts[0] = HostBuffer(2 * num_bytes, self.device)
        self._hosts[0].wait_until_sent()
        return self._hosts[0]


def new_event(device: torch.device) -> torch.cuda.Event | None:
    """None where nothing is done behind the host's back."""
    return torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
