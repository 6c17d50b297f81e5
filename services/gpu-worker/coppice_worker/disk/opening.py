"""A disk pool of a process that starts: it is there soon, or the process does without."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from hashlib import blake2b
from pathlib import Path
from threading import Thread

from coppice.edge.wire import MESSAGE_BYTES_MAX
from coppice_worker.disk.block_file import HEAD_BYTES
from coppice_worker.disk.disk_pool import Bytes, DiskPool
from coppice_worker.disk.folder import DISK_BLOCKS_MAX, DiskFolder, FolderInUse, take_others_away

OPEN_S = 60.0  # what hangs in the kernel may do so for ever; a scan alone has a bound of its own
_PAGE_BYTES = 4_096  # of a file system: a file takes whole ones

REPORTED_BLOCKS_MAX = (MESSAGE_BYTES_MAX - (1 << 20)) // 24  # of all tiers: a registration tells of each
_DIGEST_BYTES = 16
_SOURCES = (".py", ".c", ".cpp", ".h")

_log = logging.getLogger("coppice.worker")


def blocks_within(num_bytes: int, bytes_per_block: int, most: int) -> int:
    """How many files of blocks fit there, and may be told of."""
    pages = -(-(HEAD_BYTES + bytes_per_block) // _PAGE_BYTES)
    fit, most = num_bytes // (pages * _PAGE_BYTES), max(0, min(most, DISK_BLOCKS_MAX))
    if fit > most:
        _log.warning("the disk tier has %d blocks at most, %d MiB of %d", most, most * pages // 256, num_bytes >> 20)
    return min(fit, most)


def digest_of_sources() -> bytes:
    """Of this build: another one may have mended a fault of kernels or models, whose KV is not to be found again."""
    package = Path(__file__).parent.parent
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for path in sorted(path for path in package.rglob("*") if path.suffix in _SOURCES):
        raw = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(raw)} ".encode() + raw)
    return digest.digest()


def open_pool(folder: Path, identity: str, num_blocks: int, host: Bytes) -> DiskPool | None:
    """In the folder of one worker. None, with a line in the log, where it cannot be had, or does not answer."""
    made: Future[DiskPool] = Future()

    def make() -> None:
        try:
            opened = DiskFolder(folder, identity, num_blocks)
            try:
                pool = DiskPool(opened, host)
            except OSError:
                opened.close()
                raise
            made.set_result(pool)
            take_others_away(folder, identity)
        except Exception as error:
            if not made.done():
                made.set_exception(error)

    Thread(target=make, name="opening the disk tier", daemon=True).start()
    try:
        return made.result(timeout=OPEN_S)
    except TimeoutError:
        _log.warning("no disk tier: %s has not answered for %.0f s", folder, OPEN_S)
    except FileNotFoundError:
        _log.warning("no disk tier: %s is not there; mount the disk, or make the folder", folder.parent)
    except (OSError, FolderInUse) as error:
        _log.warning("no disk tier: %s", error)
    return None
