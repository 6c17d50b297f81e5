"""Sums between CPUs of several machines, by gloo. Each rank listens on one address; what it says is not encrypted."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

TIMEOUT_S = 900.0  # as `torch_group` has it; a rank that is lost ends its link long before
_THREADS = 2


class GlooGroup:
    """A `RankGroup` of processes that meet through a store; tensors lie in ordinary memory.

    gloo adds a part of the numbers in one place and tells all, so all ranks have the same bits.
    """

    def __init__(self, rank: int, size: int, store: Store, host: str) -> None:
        """`host`: address of this machine where other ranks reach this one. Blocks until all have come."""
        self.rank = rank
        self.size = size
        # `init_process_group` would choose the address that gloo listens on; its class can be told.
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        options._threads = _THREADS
        self._group = gloo(store, rank, size, options)

    def add_up(self, share: torch.Tensor) -> torch.Tensor:
        total = share.contiguous()
        self._group.allreduce([total]).wait()
        return total

    def join_columns(self, share: torch.Tensor) -> torch.Tensor:
        num_rows, width = share.shape
        ranks_first = share.new_empty(self.size * num_rows, width)
        self._group._allgather_base(ranks_first, share.contiguous()).wait()
        return ranks_first.view(self.size, num_rows, width).transpose(0, 1).reshape(num_rows, -1)

    def least(self, value: int) -> int:
        least = torch.tensor([value])
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._group.allreduce([least], options).wait()
        return int(least)

    def close(self) -> None:
        """The process ends anyway: nothing is waited for."""
