"""Blocks with contents that tell them apart, and the folder that they are kept in."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import numpy as np

from coppice.handles import UInt64, make_generation, pack_handle
from coppice.ids import BlockId, CacheEpoch, WorkerEpoch
from coppice_worker.core.batch.step_batch import Int32
from coppice_worker.disk.disk_pool import Bytes, DiskPool
from coppice_worker.disk.folder import DiskFolder

BLOCK_BYTES = 4_096
NUM_HOST_BLOCKS = 16
EPOCH = WorkerEpoch((7 << 32) | 1)
IDENTITY = "0" * 32


def handle(block: int, counter: int = 1) -> int:
    return pack_handle(BlockId(block), make_generation(CacheEpoch(7), counter))


def handles(*blocks: int, counter: int = 1) -> UInt64:
    return np.array([handle(block, counter) for block in blocks], np.uint64)


def seal(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def seals(*numbers: int) -> bytes:
    return b"".join(seal(number) for number in numbers)


def ids(*blocks: int) -> Int32:
    return np.array(blocks, np.int32)


def content(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def host_memory() -> Bytes:
    """Block i has `content(i)`."""
    return np.stack([content(number) for number in range(NUM_HOST_BLOCKS)])


def opened(path: Path, host: Bytes, num_blocks: int = 8) -> tuple[DiskFolder, DiskPool]:
    folder = DiskFolder(path, IDENTITY, num_blocks)
    return folder, DiskPool(folder, host)


def block_files(path: Path) -> list[str]:
    """Of pools that are not over."""
    return sorted(file.name for file in path.rglob("*") if file.is_file() and ".over-" not in str(file))
