"""A disk pool of a process that starts: it is there soon, or the process does without."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

from coppice_worker.disk.block_file import HEAD_BYTES
from coppice_worker.disk.disk_pool import Bytes, DiskPool
from coppice_worker.disk.folder import DISK_BLOCKS_MAX, DiskFolder, FolderInUse, take_others_away

OPEN_S = 60.0  # what hangs in the kernel may do so for ever; a scan alone has a bound of its own
_PAGE_BYTES = 4_096  # of a file system: a file takes whole ones

_log = logging.getLogger("coppice.worker")


def blocks_within(num_bytes: int, bytes_per_block: int) -> int:
    """How many files of blocks fit there."""
    pages = -(-(HEAD_BYTES + bytes_per_block) // _PAGE_BYTES)
    return min(num_bytes // (pages * _PAGE_BYTES), DISK_BLOCKS_MAX)


def open_pool(folder: Path, identity: str, num_blocks: int, host: Bytes) -> DiskPool | None:
    """In the folder of one worker. None, with a line in the log, where it cannot be had, or does not answer."""
    made: Future[DiskPool] = Future()

    def make() -> None:
        try:
            made.set_result(DiskPool(DiskFolder(folder, identity, num_blocks), host))
            take_others_away(folder, identity)
        except Exception as error:
            if not made.done():
                made.set_exception(error)

    Thread(target=make, name="opening the disk tier", daemon=True).start()
    try:
        return made.result(timeout=OPEN_S)
    except TimeoutError:
        _log.warning("no disk tier: %s has not answered for %.0f s", folder, OPEN_S)
    except (OSError, FolderInUse) as error:
        _log.warning("no disk tier: %s", error)
    return None
