"""The executor of a worker whose model is shared out among ranks."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from coppice_worker.core.batch import Executor, Int32, PoolSpec, StepBatch, StepOutput

from .commands import Command, CopyBlocks, ZeroBlocks, encode
from .errors import RankLost


class TensorParallelExecutor:
    """An `Executor`: tells the other ranks what to do, then does rank 0's share of it."""

    def __init__(self, local: Executor, channels: Mapping[int, socket.socket]) -> None:
        """`channels` by rank."""
        self._local = local
        self._channels = channels

    @property
    def pool(self) -> PoolSpec:
        return self._local.pool

    def zero_blocks(self, block_ids: Int32) -> None:
        self._tell(ZeroBlocks(block_ids))
        self._local.zero_blocks(block_ids)

    def copy_blocks(self, src: Int32, dst: Int32) -> None:
        self._tell(CopyBlocks(src, dst))
        self._local.copy_blocks(src, dst)

    def execute(self, batch: StepBatch) -> StepOutput:
        self._tell(batch)
        return self._local.execute(batch)

    def _tell(self, command: Command) -> None:
        frame = encode(command)
        for rank, channel in self._channels.items():
            try:
                channel.sendall(frame)
            except OSError as error:
                raise RankLost(rank, "has ended") from error
