"""The executor of a worker whose model is shared out among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coppice_worker.core.batch.step_batch import (
    AheadExecutor,
    Executor,
    Int32,
    Pending,
    PoolSpec,
    StepBatch,
    StepOutput,
)
from coppice_worker.parallel.channels import Channel, send_all
from coppice_worker.parallel.commands import Command, CopyBlocks, ZeroBlocks, encode


class TensorParallelExecutor:
    """An `AheadExecutor`: tells the other ranks what to do, then does rank 0's share of it.

    All ranks get the same and draw the same tokens, so nothing has to come back from them.
    """

    def __init__(self, local: Executor, channels: Mapping[int, Channel]) -> None:
        """`channels` by rank."""
        self._local = local
        self._channels = channels
        self.num_told = 0  # commands

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
        self._tell_step(batch)
        return self._local.execute(batch)

    def runs_ahead(self, batch: StepBatch) -> bool:
        return isinstance(self._local, AheadExecutor) and self._local.runs_ahead(batch)

    def launch(self, batch: StepBatch) -> Pending:
        assert isinstance(self._local, AheadExecutor)
        self._tell_step(batch)
        return self._local.launch(batch)

    def _tell_step(self, batch: StepBatch) -> None:
        """Tables are most of a step, and the ranks have those that did not change."""
        changed = batch.changed_tables
        self._tell(batch if changed is None else replace(batch, block_tables=batch.block_tables[changed]))

    def _tell(self, command: Command) -> None:
        self.num_told += 1
        send_all(self._channels, encode(command))
