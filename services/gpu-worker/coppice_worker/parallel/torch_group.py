"""Sums by torch.distributed: NCCL between GPUs. gloo does the same on a CPU, slowly; tests use it."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

STORE_FILE = "store"
TIMEOUT_S = 900.0  # ranks that load from a slow disk come late; a step that hangs is the watchdog's


class TorchGroup:
    """A `RankGroup` whose ranks find each other in a folder, which nobody else may open."""

    def __init__(
        self,
        rank: int,
        size: int,
        folder: Path,
        backend: Literal["nccl", "gloo"] = "nccl",
    ) -> None:
        self.rank = rank
        self.size = size
        self._device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        if backend == "nccl":
            torch.cuda.set_device(self._device)
        # Ranks are on one machine: what they listen on need not be reached from others.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            backend,
            init_method=f"file://{folder / STORE_FILE}",
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
        dist.all_gather_single(ranks_first, share.contiguous())
        return ranks_first.view(self.size, num_rows, width).transpose(0, 1).reshape(num_rows, -1)

    def least(self, value: int) -> int:
        least = torch.tensor([value], device=self._device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def close(self) -> None:
        """When all ranks end in order; it may wait for those that were lost."""
        dist.destroy_process_group()
