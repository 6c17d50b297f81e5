"""Sums by torch.distributed: NCCL between GPUs. gloo does the same on a CPU, slowly; tests use it."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

STORE_FILE = "store"
LOOPBACK = "lo"
# Before 2.13 torch knows it by its longer name alone.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
TIMEOUT_S = 900.0  # ranks that load from a slow disk come late; a step that hangs is the watchdog's


def store_in(folder: Path, size: int) -> Store:
    """For ranks of one machine, in a folder that nobody else may open."""
    return FileStore(str(folder / STORE_FILE), size)


class TorchGroup:
    """A `RankGroup` whose ranks find each other through a store."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        backend: Literal["nccl", "gloo"] = "nccl",
        *,
        device: int,
        interface: str = LOOPBACK,
    ) -> None:
        """`device`: number of this rank's GPU on its machine. `interface`: the network that the ranks share; of one
        machine they need not be reached from others. Blocks until all ranks have come."""
        self.rank = rank
        self.size = size
        self._device = torch.device("cuda", device) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(self._device)
        if interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        store.set_timeout(timedelta(seconds=TIMEOUT_S))
        dist.init_process_group(
            backend,
            store=PrefixStore("ranks", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT_S),
            device_id=self._device if backend == "nccl" else None,
        )

    def add_up(self, share: torch.Tensor) -> torch.Tensor:
        total = share.contiguous()
        dist.all_reduce(total)
        return total

    def join_columns(self, share: torch.Tensor) -> torch.Tensor:
        num_rows, width = share.shape
        ranks_first = share.new_empty(self.size * num_rows, width)
        _gather(ranks_first, share.contiguous())
        return ranks_first.view(self.size, num_rows, width).transpose(0, 1).reshape(num_rows, -1)

    def least(self, value: int) -> int:
        least = torch.tensor([value], device=self._device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def close(self) -> None:
        """When all ranks end in order; it may wait for those that were lost."""
        dist.destroy_process_group()
