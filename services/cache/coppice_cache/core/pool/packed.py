"""Handles packed side by side, as ledgers, leases and trees keep them."""

from __future__ import annotations

from struct import unpack

import numpy as np

from coppice.handles import BLOCKS_MAX, HANDLE_BYTES
from coppice_cache.core.pool.free_ring import Blocks

_HANDLE = np.dtype("<i8")
_BLOCK_MASK = np.int64(BLOCKS_MAX - 1)


def unpack_handles(packed: bytes | bytearray) -> tuple[int, ...]:
    return unpack(f"<{len(packed) // HANDLE_BYTES}Q", packed)


def unpack_blocks(packed: bytes | bytearray) -> list[int]:
    if len(packed) == HANDLE_BYTES:  # one block, again and again while decoding
        return [int.from_bytes(packed, "little") & (BLOCKS_MAX - 1)]
    return [handle & (BLOCKS_MAX - 1) for handle in unpack_handles(packed)]


def blocks_array(packed: bytes | bytearray) -> Blocks:
    """Block ids of packed handles, shape [N], as an index array."""
    return np.frombuffer(packed, _HANDLE) & _BLOCK_MASK
