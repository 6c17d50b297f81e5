"""Recomputes what the worker core keeps about the users of blocks."""

from __future__ import annotations

import numpy as np

from coppice_worker.core.batch.step_batch import Int32
from coppice_worker.core.blocks.copies import CopyBooks
from coppice_worker.core.blocks.pool import COPIER, BlockPool
from coppice_worker.core.sequences import SequenceTable


def check_users(pool: BlockPool, table: SequenceTable, copies: CopyBooks, reading: Int32) -> None:
    """Asserts that the users of blocks are the sequences, the copies, and a step that copies `reading` (I5-I7)."""
    copies.check()
    readers = np.zeros_like(pool.readers)
    for slot in table.slot_of.values():
        blocks = table.blocks(slot)
        assert len(np.unique(blocks)) == len(blocks), "a block stands twice in one table"
        assert not (pool.writer[blocks[: table.num_shared[slot]]] == slot + 1).any(), "a shared block is written"
        np.add.at(readers, blocks[pool.writer[blocks] != slot + 1], 1)
        assert table.num_computed[slot] <= table.num_tokens[slot] <= table.max_context + 1
    read, copied = copies.device_users()
    np.add.at(readers, read, 1)
    np.add.at(readers, reading, 1)
    assert (readers == pool.readers).all(), "readers do not match the sequences and the copies"
    assert set(np.flatnonzero(pool.writer == COPIER)) == set(copied), "copies do not write what they should"
    for block in np.flatnonzero(pool.writer > 0):
        assert block in table.blocks(int(pool.writer[block]) - 1), "a writer that does not hold its block"
    assert not pool.seal[pool.writer != 0].any(), "a sealed block is writable"
    assert pool.generation[pool.has_user()].all(), "a block that was never granted has a user"
