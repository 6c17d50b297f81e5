"""The sequences that the worker keeps between steps, one slot each, in arrays.

    slot      tokens                         block table                num_shared   num_computed / num_tokens
      0       |p p p p p p g g . . .|        |s s|o o o .|                  2             7 / 8
      1       (free)
      2       |p p p . . .          |        |o . . . . .|                  0             0 / 3

p prompt, g generated, s shared block, o own block. `num_computed` tokens have KV; prefill is far behind `num_tokens`,
decode is one behind, and nothing else tells them apart.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from coppice.ids import TOKEN_BYTES, DomainId, LeaseId, SequenceId
from coppice.messages.step import SequenceStart
from coppice_worker.core.batch.guides import OpenGuide
from coppice_worker.core.batch.sampling import SamplingTable
from coppice_worker.core.batch.step_batch import Int32, Int64, UInt32


def _mapped_zeros(rows: int, columns: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """As numpy's zeros, of which only what was written is resident.

    numpy asks for huge pages: a sequence's first token would fill 2 MiB of them, in 4 ms, while a step waits.
    """
    size = np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, rows * columns * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(rows, columns)


class SequenceTable:
    """Per-slot arrays [max_sequences]; memory of unused tails is never touched, so it is not resident."""

    def __init__(
        self, max_sequences: int, max_context: int, block_size: int, open_guide: OpenGuide | None = None
    ) -> None:
        assert max_sequences > 0
        assert max_context > 0
        self.max_context = max_context
        self.block_size = block_size
        self.max_blocks = -(-max_context // block_size)
        self.slot_of: dict[SequenceId, int] = {}
        self.ids: UInt32 = np.zeros(max_sequences, np.uint32)
        # One more column: the token sampled from the last position of a full context is kept, never computed.
        self.tokens: UInt32 = _mapped_zeros(max_sequences, max_context + 1, np.uint32)
        self.tables: Int32 = _mapped_zeros(max_sequences, self.max_blocks, np.int32)
        self.num_tokens: Int64 = np.zeros(max_sequences, np.int64)
        self.num_computed: Int64 = np.zeros(max_sequences, np.int64)
        self.num_blocks: Int64 = np.zeros(max_sequences, np.int64)
        self.num_shared: Int64 = np.zeros(max_sequences, np.int64)
        self.sampling = SamplingTable(max_sequences)
        self.leases: list[LeaseId | None] = [None] * max_sequences
        self.domains: list[DomainId | None] = [None] * max_sequences
        self.open_guide = open_guide  # None: no grammar can be followed here
        self.version = 0  # changes when sequences come or go
        self.grown: set[int] = set()  # slots whose tables grew since somebody last looked
        self._free = list(range(max_sequences - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def is_full(self) -> bool:
        return not self._free

    def add(self, start: SequenceStart) -> int:
        """A new sequence without blocks. Returns its slot."""
        slot = self._free.pop()
        self.version += 1
        self.slot_of[start.sequence_id] = slot
        self.leases[slot] = start.lease_id
        self.domains[slot] = start.domain
        count = len(start.tokens) // TOKEN_BYTES
        self.ids[slot] = start.sequence_id
        self.tokens[slot, :count] = np.frombuffer(start.tokens, "<u4")
        self.num_tokens[slot] = count
        self.num_computed[slot] = start.num_computed_tokens
        self.num_blocks[slot] = 0
        self.num_shared[slot] = 0
        guide = None
        if start.sampling.grammar:
            assert self.open_guide is not None, "whoever attaches looks"
            guide = self.open_guide(start.domain, start.sampling.grammar, start.request_id)
        self.sampling.put(slot, start.sampling, start.num_prompt_tokens or count, guide)
        return slot

    def append_blocks(self, slot: int, blocks: Int32) -> None:
        start = int(self.num_blocks[slot])
        self.tables[slot, start : start + len(blocks)] = blocks
        self.num_blocks[slot] = start + len(blocks)
        self.grown.add(slot)

    def blocks(self, slot: int) -> Int32:
        """The sequence's block table, without padding."""
        return self.tables[slot, : int(self.num_blocks[slot])]

    def remove(self, sequence_id: SequenceId) -> int:
        """Frees the slot and returns it; its blocks are the caller's business."""
        slot = self.slot_of.pop(sequence_id)
        self.version += 1
        self.leases[slot] = None
        self.domains[slot] = None
        self.num_blocks[slot] = 0
        self.num_tokens[slot] = 0
        self.num_computed[slot] = 0
        self.sampling.drop(slot)
        self._free.append(slot)
        return slot

    def clear(self) -> None:
        for sequence_id in list(self.slot_of):
            self.remove(sequence_id)
