"""Handles: which block, and whose turn it is.

     63            48 47            24 23             0
    | epoch in era   | block counter  |   block id     |     one little-endian u64
    |<------- generation (40) ------->|

    era              0           |  1                |           cache epochs have 32 bits; the handle carries where
    cache epoch      1 ... 65535 |  65536 ... 131070 | ...       one stands within its era, never 0. All generations
    epoch in era     1 ... 65535 |  1 ... 65535      |           of a pool are of one era.

A generation stamps one occupancy of a block. The cache service grants strictly increasing generations per block;
the worker compares them at every use. Lists of handles travel packed, 8 bytes each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coppice.ids import BlockId, CacheEpoch, Generation

HANDLE_BYTES = 8
BLOCK_BITS = 24
COUNTER_BITS = 24
BLOCKS_MAX = 1 << BLOCK_BITS
COUNTER_MAX = (1 << COUNTER_BITS) - 1
CACHE_EPOCH_MAX = (1 << 32) - 1
ERA_EPOCHS = (1 << 16) - 1  # cache epochs of one era

UInt64 = npt.NDArray[np.uint64]


def pack_handle(block: BlockId, generation: Generation) -> int:
    """One handle as an int below 2**64."""
    assert 0 <= block < BLOCKS_MAX
    return (generation << BLOCK_BITS) | block


def block_of(handle: int) -> BlockId:
    return BlockId(handle & (BLOCKS_MAX - 1))


def generation_of(handle: int) -> Generation:
    return Generation(handle >> BLOCK_BITS)


def make_generation(epoch: CacheEpoch, counter: int) -> Generation:
    assert 0 <= epoch <= CACHE_EPOCH_MAX
    assert 0 <= counter <= COUNTER_MAX
    return Generation((epoch_in_era(epoch) << COUNTER_BITS) | counter)


def era_of(epoch: CacheEpoch) -> int:
    """Generations rise with the epochs of one era only. Epoch 0 is none, and of none."""
    return (epoch - 1) // ERA_EPOCHS


def epoch_in_era(epoch: CacheEpoch) -> int:
    """What a generation carries of the epoch that granted it; 0 for epoch 0."""
    return (epoch - 1) % ERA_EPOCHS + 1 if epoch else 0


def epoch_of(generation: Generation) -> int:
    """Which epoch within its era granted it; 0: none."""
    return generation >> COUNTER_BITS


def handles_array(packed: bytes) -> UInt64:
    """View of packed handles, shape [N], no copy. Raises ValueError on a length that is no multiple of 8."""
    return np.frombuffer(packed, dtype="<u8")


def block_ids(packed: bytes) -> npt.NDArray[np.int32]:
    """Block ids of packed handles, shape [N]."""
    return (handles_array(packed) & np.uint64(BLOCKS_MAX - 1)).astype(np.int32)


def generations(packed: bytes) -> UInt64:
    """Generations of packed handles, shape [N]."""
    return handles_array(packed) >> np.uint64(BLOCK_BITS)
