"""Blocks of KV on a disk, and copies between them and the blocks of the host's memory.

    store   the block's older file goes -> KV to NAME.part, synced -> renamed -> folder synced       whole, or not there
    load    NAME read -> head and checksum are those of its name              right, or lost, or not to be read now

At most one file for each block, so the pool never takes more than `num_blocks` of them. A process that is killed
leaves, for the blocks that it was writing, the older file, no file, or a whole new one.

A disk that takes no more, or fails, is no fault of any request: what cannot be written is said to be not there, and
for a while nothing is written at all. What cannot be read is lost, and computed again.

A read or write may hang in the kernel, and go on when nobody waits for it any more and the host's blocks are others'.
So the disk is read and written through a buffer of one block, and blocks of the host are touched only between it and
them, and only while the worker epoch of the copy lasts and the pool is not closed.

`store` and `load` are called from one thread, the others from any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock, Thread

import numpy as np
import numpy.typing as npt

from coppice.handles import BLOCK_BITS, UInt64, block_of
from coppice.ids import WorkerEpoch
from coppice.seals import SEAL_BYTES
from coppice_worker.core.batch.step_batch import Bool, Int32
from coppice_worker.disk.block_file import BlockName, NotWhole, read_block, sync_folder, write_block
from coppice_worker.disk.folder import DiskFolder, Found, ScanTooLong, take_away

REST_S = 30.0  # in which nothing is written, after the disk has failed to

_log = logging.getLogger("coppice.worker")

Bytes = npt.NDArray[np.uint8]


class _IsOver(Exception):
    """Nobody waits for this copy any more."""


class DiskPool:
    """`host` are the host's blocks [num_host_blocks, bytes_per_block]."""

    def __init__(self, folder: DiskFolder, host: Bytes, clock: Callable[[], float] = time.monotonic) -> None:
        """With what is in the folder; what takes too long to be listed is not kept. Raises OSError."""
        self._folder = folder
        self._host = host
        self._buffer: Bytes = np.empty(host.shape[1], np.uint8)
        self._touching = Lock()  # blocks of the host
        self._clock = clock
        self._rests_until_s = -np.inf
        self._is_closed = self._keeps = self._has_failed = False
        self.num_blocks = folder.num_blocks
        self.num_tried = 0  # blocks that were to be copied so far
        self.num_lost = 0  # blocks whose file was gone or wrong when it was read
        try:
            found = folder.scan()
        except ScanTooLong as error:
            _log.warning("the disk tier begins anew: %s", error)
            found = Found(WorkerEpoch(0), ())
        self.epoch = self._begun = found.epoch  # `_begun` is what the folder is named by
        # Of the block with this id; handle 0 where there is none, as every generation is above 0.
        self._handles: UInt64 = np.zeros(folder.num_blocks, np.uint64)
        self._seals: UInt64 = np.zeros((folder.num_blocks, 2), np.uint64)
        for name in found.names:
            self._note(name)
        self._take_leftovers_away()

    @property
    def is_resting(self) -> bool:
        """The disk failed lately, so nothing is written."""
        return self._clock() < self._rests_until_s

    @property
    def takes_blocks(self) -> bool:
        """False from an error on, until something was stored again, or read after the rest."""
        return not self._is_closed and not self._has_failed

    def reported(self) -> tuple[WorkerEpoch, UInt64, UInt64]:
        """Their epoch, generations [num_blocks] and seals [num_blocks, 2] by the names of the files; zeros where there
        is none. Before anything is copied."""
        return self.epoch, self._handles >> np.uint64(BLOCK_BITS), self._seals.copy()

    def begin(self, epoch: WorkerEpoch, *, keeps: bool = False) -> None:
        """What is there belongs to this epoch from now on, or is over, and so are the copies of the epoch before. This
        waits for no disk: the folder is told before the next block is copied, and again where that fails."""
        with self._touching:
            self._keeps = keeps and (self._keeps or self._begun == self.epoch)
            self.epoch = epoch

    def close(self) -> None:
        """Nothing is kept there any more."""
        with self._touching:
            self._is_closed = True

    def _enter(self, epoch: WorkerEpoch) -> None:
        """Before blocks are copied under this epoch. Raises OSError, and _IsOver."""
        with self._touching:
            self._check(epoch)
            keeps = self._keeps
        if self._begun == epoch:
            return
        if keeps:
            self._go_on(epoch)
        else:
            self._handles[:], self._seals[:] = 0, 0
            self._folder.begin(epoch)
        self._begun = epoch
        self._take_leftovers_away()

    def _go_on(self, epoch: WorkerEpoch) -> None:
        """Where the folder keeps its name, the next process says the epoch of before, and may have to begin anew."""
        try:
            self._folder.go_on(epoch)
        except OSError as error:
            self._rest("rename", error)

    def _take_leftovers_away(self) -> None:
        """Beside the work: there may be a million files."""
        if leftovers := self._folder.leftovers():
            Thread(target=take_away, args=(leftovers,), name="old files", daemon=True).start()

    def store(self, epoch: WorkerEpoch, src: Int32, handles: UInt64, seals: bytes) -> Bool:
        """Copies blocks src [N] of the host to blocks `handles` [N] of the disk, with their packed `seals`.

        Which of them are there, [N]. What is, outlives this process and a loss of power.
        """
        names = _names(handles, seals)
        whole: Bool = np.zeros(len(names), np.bool_)
        if self.is_resting:
            return whole
        try:
            self._enter(epoch)
            for index, (block, name) in enumerate(zip(src.tolist(), names, strict=True)):
                self.num_tried += 1
                self._store(epoch, block, name)
                whole[index] = True
            for folder in {self._folder.part_of(block_of(name.handle)) for name in names}:
                sync_folder(folder)
            self._has_failed = self._has_failed and not names
        except OSError as error:
            self._rest("write to", error)
            whole[:] = False
        except _IsOver:
            whole[:] = False
        return whole

    def _store(self, epoch: WorkerEpoch, block: int, name: BlockName) -> None:
        with self._touching:
            self._check(epoch)
            self._buffer[:] = self._host[block]
        self._forget(block_of(name.handle))
        write_block(self._folder.part_of(block_of(name.handle)), name, self._buffer.data)
        self._note(name)

    def load(self, epoch: WorkerEpoch, handles: UInt64, seals: bytes, dst: Int32) -> tuple[Bool, Bool]:
        """Copies blocks `handles` [N] of the disk, whose packed `seals` these are, to blocks dst [N] of the host.

        Which of them have come, and which are lost, [N] each. One that is neither may come another time.
        """
        come, is_lost = np.zeros((2, len(handles)), np.bool_)
        try:
            self._enter(epoch)
        except (OSError, _IsOver) as error:
            _log.debug("nothing is loaded: %s", error)
            return come, is_lost
        lost: list[str] = []
        for index, (name, block) in enumerate(zip(_names(handles, seals), dst.tolist(), strict=True)):
            self.num_tried += 1
            try:
                read_block(self._folder.part_of(block_of(name.handle)), name, self._buffer.data)
                with self._touching:
                    self._check(epoch)
                    self._host[block] = self._buffer
                come[index] = True
                self._has_failed = self._has_failed and self.is_resting
            except NotWhole as error:
                lost.append(f"{name}: {error}")
                is_lost[index] = True
                self._lose(name)
            except OSError as error:
                self._rest("read from", error)
                break
            except _IsOver:
                break
        if lost:
            self.num_lost += len(lost)
            _log.warning("%d blocks of the disk tier are lost, the first: %s", len(lost), lost[0])
        return come, is_lost

    def _check(self, epoch: WorkerEpoch) -> None:
        """Raises _IsOver."""
        if self._is_closed or epoch != self.epoch:
            raise _IsOver

    def _lose(self, name: BlockName) -> None:
        if self._name_at(block_of(name.handle)) == name:
            try:
                self._forget(block_of(name.handle))
            except OSError as error:
                self._rest("remove a file of", error)

    def _forget(self, block: int) -> None:
        """Its file goes, which is of no use to anybody: the block is granted again, or the file is bad."""
        if (name := self._name_at(block)) is not None:
            (self._folder.part_of(block) / str(name)).unlink(missing_ok=True)
            self._handles[block], self._seals[block] = 0, 0

    def _note(self, name: BlockName) -> None:
        block = block_of(name.handle)
        self._handles[block], self._seals[block] = name.handle, np.frombuffer(name.seal, "<u8")

    def _name_at(self, block: int) -> BlockName | None:
        handle = int(self._handles[block])
        return BlockName(handle, self._seals[block].tobytes()) if handle else None

    def _rest(self, what: str, error: OSError) -> None:
        if not self.is_resting:
            _log.warning("cannot %s the disk tier (%s); nothing is kept there for %.0f s", what, error, REST_S)
        self._rests_until_s, self._has_failed = self._clock() + REST_S, True


def _names(handles: UInt64, seals: bytes) -> list[BlockName]:
    assert len(seals) == len(handles) * SEAL_BYTES
    return [
        BlockName(handle, seals[index * SEAL_BYTES : (index + 1) * SEAL_BYTES])
        for index, handle in enumerate(handles.tolist())
    ]
