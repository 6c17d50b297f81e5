"""The files of a simulated worker's disk: they stay when its process ends, but for what the crash tore."""

from __future__ import annotations

from random import Random

import numpy as np

from coppice.handles import block_ids, generations, handles_array
from coppice.ids import WorkerEpoch
from coppice.messages.registration import CopyOrder
from coppice_sim.hosts.kv_honest import KvHonest
from coppice_worker.core.batch.step_batch import Int32, PoolSpec
from coppice_worker.core.blocks.pool import BlockPool

_NONE = WorkerEpoch(0)


class DiskFiles:
    """Names of blocks and their contents. A file that is torn has the right name, and nothing can be read of it."""

    def __init__(self, pool: PoolSpec, rng: Random, faults: float) -> None:
        self.memory = KvHonest(pool)
        self.epoch = _NONE
        self._rng = rng
        self._faults = faults
        self._generations = np.zeros(pool.num_blocks, np.uint64)
        self._seals = np.zeros((pool.num_blocks, 2), np.uint64)
        self._is_torn = np.zeros(pool.num_blocks, np.bool_)

    def found_by(self, pool: BlockPool) -> int:
        """A process starts and lists what is there. Returns how many blocks that are."""
        for block in np.flatnonzero(self._generations).tolist():
            if self._rng.random() < self._faults / 4:
                self._is_torn[block] = True
            elif self._rng.random() < self._faults / 4:
                self.remove(np.array([block], np.int32))
        pool.load(self.epoch, self._generations, self._seals)
        return int(np.count_nonzero(self._generations))

    def remove(self, blocks: Int32) -> None:
        self._generations[blocks], self._seals[blocks], self._is_torn[blocks] = 0, 0, False

    def written(self, order: CopyOrder) -> None:
        blocks = block_ids(order.dst)
        self._generations[blocks] = generations(order.dst)
        self._seals[blocks] = np.frombuffer(order.seals, "<u8").reshape(-1, 2)

    def lost_from(self, order: CopyOrder) -> int | None:
        """Of what is to be read, the first block whose file is torn or gone; None when all are whole."""
        blocks, claimed = block_ids(order.src), handles_array(order.src)
        named = (self._generations[blocks] << np.uint64(24)) | blocks.astype(np.uint64)
        lost = np.flatnonzero((named != claimed) | self._is_torn[blocks])
        return int(lost[0]) if lost.size else None

    def begin(self, epoch: WorkerEpoch, *, keeps: bool) -> None:
        if not keeps:
            everything = np.arange(len(self._generations), dtype=np.int32)
            self.remove(everything)
            self.memory.zero_blocks(everything)
        self.epoch = epoch
