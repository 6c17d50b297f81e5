"""The folder of one disk pool: who has it, under which epoch it is kept, and what is left there from before.

    FOLDER/<identity>/                    0700 and ours, as FOLDER is; locked by the one process that uses it
        000100000002a/                    the worker epoch that it belongs to; there is one
            000/ 001/ ...                 4,096 block ids each
                <handle>-<seal>           a block
        000100000001f.over-0/             of an epoch that is over; taken away beside the work

An identity is all that the KV of a block depends on beside its tokens. A worker that has another model, type, block
size or build by now gets another folder, and takes the one before away.

Nothing here is trusted before it is read: what the names say is told to the cache service, which compares it with what
it knows, and a block is used only when its file is what its name says.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from coppice.handles import block_of
from coppice.ids import WorkerEpoch
from coppice_worker.disk.block_file import BlockName, parse_name, sync_folder

DISK_BLOCKS_MAX = 1 << 20  # of one pool
SCAN_S = 20.0  # a folder that takes longer to list begins anew
_PART_BLOCKS = 4_096
_PRIVATE = 0o700
_EPOCH_DIGITS = 16
_OVER = ".over-"
_HEX = "0123456789abcdef"
_IDENTITY_DIGITS = 32
_NONE = "none"  # before a pool has begun


class ScanTooLong(Exception):
    """There was no time to list all blocks."""


class FolderInUse(Exception):
    """Another process has it."""


class FolderNotOurs(OSError):
    """Somebody else may read it, or say what tenants read."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the names in the folder say: one block each."""

    epoch: WorkerEpoch
    names: tuple[BlockName, ...]


def identity_of(*parts: str | bytes) -> str:
    """A name for all of these: 32 hex digits. Two lists that differ anywhere have two names."""
    digest = blake2b(digest_size=_IDENTITY_DIGITS // 2)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


class DiskFolder:
    """For `num_blocks` blocks. Held from its creation until `close`, or until the process is gone, however it ends."""

    def __init__(self, folder: Path, identity: str, num_blocks: int) -> None:
        """`folder` is made if what it is in is there: a disk that is not mounted must not be taken for one that is.

        Raises FolderInUse, and OSError where nothing can be kept there.
        """
        os.close(_own(folder))
        self._top = folder / identity
        self._lock = _own(self._top)
        try:
            # Let go by the kernel. No process that is started here inherits it.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._lock), os.stat(self._top)):
                raise BlockingIOError("it was taken away, and made again by another process")
        except BlockingIOError as error:
            os.close(self._lock)
            raise FolderInUse(f"{self._top} is used by another process") from error
        except OSError:
            os.close(self._lock)
            raise
        self.num_blocks = num_blocks
        self._parts = tuple(f"{number:03x}" for number in range(-(-num_blocks // _PART_BLOCKS)))
        self._pool = self._top / _NONE

    def close(self) -> None:
        os.close(self._lock)

    def part_of(self, block: int) -> Path:
        """Where the files of this block are."""
        return self._pool / self._parts[block // _PART_BLOCKS]

    def scan(self, clock: Callable[[], float] = time.monotonic) -> Found:
        """What was kept here last, without what is no block of a pool of this size, and the older of two of one block:
        those are taken away.

        Of several epochs none counts, as nobody knows which one was begun last. Raises OSError and ScanTooLong.
        """
        kept = [entry for entry in os.listdir(self._top) if _is_epoch(entry) and _is_folder(self._top / entry)]
        if len(kept) != 1:
            return Found(WorkerEpoch(0), ())
        self._pool = self._top / kept[0]
        for entry in os.listdir(self._pool):
            if entry not in self._parts or not _is_folder(self._pool / entry):  # of a larger pool
                self._set_aside(self._pool / entry)
        newest: dict[int, BlockName] = {}
        ends_s = clock() + SCAN_S
        for part in self._parts:
            if clock() > ends_s:
                raise ScanTooLong(f"the files of {self._pool} were not listed within {SCAN_S:.0f} s")
            self._scan_part(part, newest)
        sync_folder(self._pool)  # parts that were not there
        return Found(WorkerEpoch(int(kept[0], 16)), tuple(newest.values()))

    def _scan_part(self, part: str, newest: dict[int, BlockName]) -> None:
        folder = self._pool / part
        folder.mkdir(mode=_PRIVATE, exist_ok=True)  # of a smaller pool, or the process died while it began
        for text in os.listdir(folder):
            if _is_folder(folder / text):
                self._set_aside(folder / text)
                continue
            name = parse_name(text)
            block = self.num_blocks if name is None else block_of(name.handle)
            if name is None or block >= self.num_blocks or self.part_of(block) != folder:
                (folder / text).unlink(missing_ok=True)
                continue
            other = newest.get(block)
            if other is not None:  # it died before the older one was gone: a higher handle has a higher generation
                (folder / str(min(other, name))).unlink(missing_ok=True)
                name = max(other, name)
            newest[block] = name

    def begin(self, epoch: WorkerEpoch) -> None:
        """An empty pool of this epoch. What was there before is not found any more. Raises OSError."""
        for entry in os.listdir(self._top):
            if _is_epoch(entry):
                self._set_aside(self._top / entry)
        self._pool = self._top / f"{epoch:0{_EPOCH_DIGITS}x}"
        self._pool.mkdir(mode=_PRIVATE)
        for part in self._parts:
            (self._pool / part).mkdir(mode=_PRIVATE)
        sync_folder(self._pool)
        sync_folder(self._top)

    def go_on(self, epoch: WorkerEpoch) -> None:
        """What is there belongs to this epoch from now on. Raises OSError; then it belongs to the one before still."""
        pool = self._top / f"{epoch:0{_EPOCH_DIGITS}x}"
        os.rename(self._pool, pool)
        self._pool = pool
        sync_folder(self._top)

    def leftovers(self) -> tuple[Path, ...]:
        """Of pools that are over."""
        return tuple(self._top / entry for entry in os.listdir(self._top) if _OVER in entry)

    def _set_aside(self, path: Path) -> None:
        number = 0
        while (over := self._top / f"{path.name}{_OVER}{number}").exists():
            number += 1
        os.rename(path, over)


def take_away(leftovers: Iterable[Path]) -> None:
    """May take long. What cannot be removed stays for the next time; another one may be taking the same away."""
    for path in leftovers:
        with suppress(OSError):
            if _is_folder(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def take_others_away(folder: Path, identity: str) -> None:
    """Pools of other identities in the folder of a worker, as another model or build left them: nobody reads them
    again. Those that a process has are left alone, and so is what is none of ours. May take long."""
    for entry in os.listdir(folder):
        if entry == identity or len(entry) != _IDENTITY_DIGITS or entry.strip(_HEX):
            continue
        try:
            other = DiskFolder(folder, entry, 0)
        except (OSError, FolderInUse):
            continue
        shutil.rmtree(folder / entry, ignore_errors=True)
        other.close()


def _own(folder: Path) -> int:
    """Open it, or make it, for nobody but us. Raises OSError."""
    with suppress(FileExistsError):
        folder.mkdir(mode=_PRIVATE)
        with suppress(PermissionError):  # who may make folders there may not list them
            sync_folder(folder.parent)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    try:
        if found.st_uid != os.geteuid():
            raise FolderNotOurs(f"{folder} belongs to user {found.st_uid}, and this process runs as {os.geteuid()}")
        if stat.S_IMODE(found.st_mode) & ~_PRIVATE:
            os.fchmod(descriptor, _PRIVATE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_folder(path: Path) -> bool:
    """And no link to one."""
    return stat.S_ISDIR(path.lstat().st_mode)


def _is_epoch(entry: str) -> bool:
    return len(entry) == _EPOCH_DIGITS and not entry.strip(_HEX)
