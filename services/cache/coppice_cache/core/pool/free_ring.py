"""Free blocks of one worker, first in, first out; and packed handles to numbers and back.

A ring of as many places as there are blocks: each block is in it at most once, so it never overflows. Taking and adding
cost one or two copies of a slice, whatever the number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import unpack

import numpy as np
import numpy.typing as npt

from coppice.handles import BLOCKS_MAX, HANDLE_BYTES

Blocks = npt.NDArray[np.int64]

_NOT_PLANNED = "blocks were taken that nobody planned for"


class FreeRing:
    """Block ids, the one that is free for longest first."""

    __slots__ = ("_first", "_places", "_scalars", "_size")

    def __init__(self, blocks: Blocks, capacity: int) -> None:
        self._places = np.zeros(capacity, np.int32)
        self._places[: len(blocks)] = blocks
        self._scalars = self._places.data  # one element of it costs a third of numpy's
        self._first = 0
        self._size = len(blocks)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return iter(self.blocks().tolist())

    def blocks(self) -> Blocks:
        """All of them in order, shape [len], without taking any."""
        return self._run(self._first, self._size)

    def popleft(self) -> int:
        assert self._size, _NOT_PLANNED
        block = self._scalars[self._first]
        self._first = (self._first + 1) % len(self._places)
        self._size -= 1
        return block

    def append(self, block: int) -> None:
        capacity = len(self._places)
        assert self._size < capacity, "more blocks are free than there are"
        self._scalars[(self._first + self._size) % capacity] = block
        self._size += 1

    def take(self, count: int) -> Blocks:
        """The first `count`, shape [count]."""
        assert count <= self._size, _NOT_PLANNED
        taken = self._run(self._first, count)
        self._first = (self._first + count) % max(1, len(self._places))
        self._size -= count
        return taken

    def extend(self, blocks: Blocks) -> None:
        """Behind all others, in this order."""
        capacity, count = len(self._places), len(blocks)
        assert self._size + count <= capacity, "more blocks are free than there are"
        start = (self._first + self._size) % capacity
        fits = min(count, capacity - start)
        self._places[start : start + fits] = blocks[:fits]
        self._places[: count - fits] = blocks[fits:]
        self._size += count

    def clear(self) -> None:
        self._first = self._size = 0

    def _run(self, start: int, count: int) -> Blocks:
        stop = start + count
        if stop <= len(self._places):
            return self._places[start:stop].astype(np.int64)
        wrapped = (self._places[start:], self._places[: stop - len(self._places)])
        return np.concatenate(wrapped).astype(np.int64)


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
