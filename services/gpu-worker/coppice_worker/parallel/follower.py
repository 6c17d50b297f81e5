"""What a rank other than 0 does with the commands that it gets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coppice_worker.core.batch.step_batch import AheadExecutor, Executor, Int32, Pending, StepBatch
from coppice_worker.edge.copies.copier import TierCopier
from coppice_worker.parallel.channels import Channel
from coppice_worker.parallel.commands import CopyBlocks, Demote, Promote, ZeroBlocks, receive
from coppice_worker.parallel.tiers import DONE, Progress


def follow(executor: Executor, channel: Channel, progress: Progress) -> None:
    """Computes what comes on the channel until it is closed."""
    steps = _Steps(executor)
    while (command := receive(channel)) is not None:
        match command:
            case ZeroBlocks(block_ids):
                executor.zero_blocks(block_ids)
            case CopyBlocks(src, dst):
                executor.copy_blocks(src, dst)
            case StepBatch():
                steps.compute(command)
        progress.count()


def follow_copies(tiers: TierCopier, channel: Channel, progress: Progress) -> None:
    """Copies what comes on the channel until it is closed, and answers."""
    while (command := receive(channel)) is not None:
        match command:
            case Demote(after, src, dst):
                progress.wait_for(after)
                tiers.demote(src, dst)
            case Promote(after, src, dst):
                progress.wait_for(after)
                tiers.promote(src, dst)
        channel.sendall(DONE)


class _Steps:
    """Steps in their order. What runs ahead is not waited for before the next step is there, as at rank 0."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._tables = np.zeros((0, 0), np.int32)
        self._pending: Pending | None = None

    def compute(self, sent: StepBatch) -> None:
        """Its tables are those that changed."""
        batch = replace(sent, block_tables=self._whole_tables(sent))
        before, self._pending = self._pending, None
        if isinstance(self._executor, AheadExecutor) and self._executor.runs_ahead(batch):
            self._pending = self._executor.launch(batch)
            if before is not None:
                before.wait()
            return
        if before is not None:
            before.wait()
        self._executor.execute(batch)

    def _whole_tables(self, sent: StepBatch) -> Int32:
        if sent.changed_tables is None:
            self._tables = sent.block_tables
        else:
            self._tables[sent.changed_tables] = sent.block_tables
        return self._tables
