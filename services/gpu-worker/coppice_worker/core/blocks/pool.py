"""What the worker knows of each physical block: the last line of defence of the KV cache.

    generation  0        never granted, or the pool is new
    writer      0        nobody may write; otherwise 1 + slot of the one sequence that may, or COPIER
    readers     0..      sequences, and copies to another tier, that hold the block without writing it
    seal        zeros    not published; otherwise what is in the block, and it is never written again
    lease       zeros    which lease opened this occupancy

    open (owned handle)        publish                 last user detaches
    -------------------> written -------> sealed, read ------------------> same, without users

Only an owned handle opens an occupancy; a shared one must equal what is here. All questions and actions take whole
arrays of handles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coppice.handles import BLOCK_BITS, BLOCKS_MAX
from coppice.ids import LeaseId, WorkerEpoch
from coppice.messages.step import RefusalCode
from coppice.seals import SEAL_BYTES
from coppice_worker.core.batch.step_batch import Bool, Int32, UInt64

COPIER = -1  # the user whose write is a copy from another tier
_BLOCK_MASK = np.uint64(BLOCKS_MAX - 1)
_SHIFT = np.uint64(BLOCK_BITS)


@dataclass(frozen=True, slots=True)
class BlockRefusal:
    """Why a handle may not be used; `handle` is the first offending one."""

    code: RefusalCode
    handle: int


class BlockPool:
    """Generation, users and seal of every block. All arrays have shape [num_blocks] or [num_blocks, 2]."""

    def __init__(self, num_blocks: int) -> None:
        assert 0 <= num_blocks <= BLOCKS_MAX
        self.num_blocks = num_blocks
        self.generation: UInt64 = np.zeros(num_blocks, np.uint64)
        self.writer: Int32 = np.zeros(num_blocks, np.int32)
        self.readers: Int32 = np.zeros(num_blocks, np.int32)
        self.seal: UInt64 = np.zeros((num_blocks, 2), np.uint64)
        self.lease: UInt64 = np.zeros((num_blocks, 2), np.uint64)
        self.epoch = WorkerEpoch(0)  # of a pool below the device: which its blocks belong to

    # -- questions

    def why_not_read(self, handles: UInt64, seals: bytes) -> BlockRefusal | None:
        """`handles` [N] with their packed `seals`: generation and seal must both equal the block's."""
        assert len(seals) == len(handles) * SEAL_BYTES
        blocks, generations, known = self._split(handles)
        claimed = np.frombuffer(seals, "<u8").reshape(-1, 2)
        stale = ~known | (self.generation[blocks] != generations) | (generations == 0)
        seal = self.seal[blocks]
        wrong = (seal != claimed).any(axis=1) | ~claimed.any(axis=1)
        return _first(handles, stale, RefusalCode.STALE) or _first(handles, wrong, RefusalCode.WRONG_SEAL)

    def why_not_write(self, handles: UInt64, lease: UInt64) -> BlockRefusal | None:
        """A newer generation needs a block without users; an equal one is the same lease coming back to its own.

        `lease` holds `lease_words`, shape [2] or one row per handle, [N, 2].
        """
        blocks, generations, known = self._split(handles)
        here = self.generation[blocks]
        stale = ~known | (generations < here) | (generations == 0)
        used = (self.writer[blocks] != 0) | (self.readers[blocks] != 0)
        foreign = (self.lease[blocks] != lease).any(axis=1) | self.seal[blocks].any(axis=1)
        double = used | ((generations == here) & foreign)
        return _first(handles, stale, RefusalCode.STALE) or _first(handles, double, RefusalCode.DOUBLE_GRANT)

    def is_current(self, handles: UInt64) -> Bool:
        """Per handle [N]: does it name the block's present occupancy?"""
        blocks, generations, known = self._split(handles)
        current: Bool = known & (self.generation[blocks] == generations) & (generations != 0)
        return current

    def handles_of(self, blocks: Int32) -> UInt64:
        """Handles of the present occupancies of `blocks` [N]."""
        return (self.generation[blocks] << _SHIFT) | blocks.astype(np.uint64)

    def has_user(self) -> Bool:
        users: Bool = (self.writer != 0) | (self.readers != 0)
        return users

    # -- actions; each assumes that its question was answered

    def read(self, handles: UInt64) -> None:
        np.add.at(self.readers, self._split(handles)[0], 1)

    def read_no_more(self, blocks: Int32) -> None:
        """`blocks` [N] of an earlier `read` that no table has."""
        np.subtract.at(self.readers, blocks, 1)

    def open(self, handles: UInt64, lease: UInt64, user: int | Int32) -> None:
        """`user` is the sequence's slot + 1, or COPIER; `lease` and `user` may differ per handle."""
        blocks, generations, _ = self._split(handles)
        self.generation[blocks] = generations
        self.seal[blocks] = 0
        self.lease[blocks] = lease
        self.writer[blocks] = user

    def leave(self, blocks: Int32, user: int) -> None:
        """`user` stops using `blocks` [N]: as the writer where it still is one, else as a reader."""
        written = self.writer[blocks] == user
        self.writer[blocks[written]] = 0
        np.subtract.at(self.readers, blocks[~written], 1)

    def set_seals(self, handles: UInt64, seals: bytes) -> int:
        """Publish blocks: the writer becomes a reader. Handles of another occupancy, blocks that already have another
        seal and those that a copy still writes are left alone; returns how many those were."""
        assert len(seals) == len(handles) * SEAL_BYTES
        claimed = np.frombuffer(seals, "<u8").reshape(-1, 2)
        blocks = self._split(handles)[0]
        before = self.seal[blocks]
        again = (before == claimed).all(axis=1)
        right = self.is_current(handles) & (again | ~before.any(axis=1)) & claimed.any(axis=1)
        right &= self.writer[blocks] != COPIER
        self.seal[blocks[right]] = claimed[right]
        written = np.unique(blocks[right])
        written = written[self.writer[written] != 0]
        self.writer[written] = 0
        self.readers[written] += 1
        return len(handles) - int(np.count_nonzero(right))

    def lose(self, blocks: Int32) -> None:
        """What was in `blocks` [N] is gone: they have no seal, so nobody reads them, until they are opened again."""
        self.seal[blocks] = 0

    def load(self, epoch: WorkerEpoch, generations: UInt64, seals: UInt64) -> None:
        """What an earlier process left, which nobody uses: generations [num_blocks], seals [num_blocks, 2]."""
        self.epoch, self.generation[:], self.seal[:] = epoch, generations, seals

    def forget_users(self) -> None:
        self.writer[:] = 0
        self.readers[:] = 0

    def reset(self) -> None:
        """A new worker epoch: every old handle and seal is stale."""
        self.forget_users()
        self.generation[:] = 0
        self.seal[:] = 0
        self.lease[:] = 0

    def packed(self) -> tuple[bytes, bytes]:
        """Generations, u64 [num_blocks], and seals, 16 bytes each."""
        return self.generation.astype("<u8", copy=False).tobytes(), self.seal.astype("<u8", copy=False).tobytes()

    def _split(self, handles: UInt64) -> tuple[Int32, UInt64, Bool]:
        """Block ids (0 where out of range), generations, and which ids are in range."""
        ids = handles & _BLOCK_MASK
        known: Bool = ids < np.uint64(self.num_blocks)
        blocks: Int32 = np.where(known, ids, 0).astype(np.int32)
        return blocks, handles >> _SHIFT, known


def lease_words(lease: LeaseId) -> UInt64:
    """A lease id as two words, shape [2]."""
    return np.frombuffer(lease, "<u8")


def _first(handles: UInt64, bad: Bool, code: RefusalCode) -> BlockRefusal | None:
    if not bad.any():
        return None
    return BlockRefusal(code, int(handles[int(bad.argmax())]))
