"""Numbers of a worker's running sequences, one slot each, so that steps are planned and taken with array operations.

    slot       ids   num_known   num_planned   num_pending   num_reserved   ...   tail
      0         7       212          211            0             224              [ 9 4 4 . . ]  3 of them
      1         .    (free)
      2        12        16           17            2              32              [ . . . . . ]

A slot of its own keeps a sequence's place among the rows of a plan for as long as it runs, so an unchanged batch stays
the same bytes. `tail` holds the newest known tokens that were not appended to the request's own bytes yet: that is
done once per block, or when somebody asks for the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from coppice.ids import SequenceId
from coppice_scheduler.core.state.settings import DECODE_STEPS_MAX


class HasId(Protocol):
    sequence_id: SequenceId


S = TypeVar("S", bound=HasId)  # what a slot stands for: a sequence, which is defined above this module
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
Bool = npt.NDArray[np.bool_]

FIRST_SLOTS = 64
STOPS_MAX = 8  # stop tokens that a slot holds; who has more is looked at one by one
TAIL_MAX = DECODE_STEPS_MAX  # tokens of a slot that wait to be appended: what one plan brings at most
NO_TOKEN = 0xFFFF_FFFF  # fills what is unused; no vocabulary is so large

_COUNTS = (
    "num_known",
    "num_planned",
    "num_computed",
    "num_pending",
    "num_reserved",
    "num_ahead",
    "num_start",
    "num_sent",
    "num_max",
    "next_look",
    "num_tail",
    "tenants",
)
_FLAGS = ("attached", "has_news", "has_first", "is_plain", "is_watched", "is_special")


class SlotTable(Generic[S]):
    """All arrays have shape [slots], `stops` and `tail` have a second dimension. Counts are tokens."""

    num_known: Int64  # prompt and output, as far as results told
    num_planned: Int64
    num_computed: Int64
    num_pending: Int64  # sampled in steps without a result
    num_reserved: Int64  # that its blocks have room for
    num_ahead: Int64  # to own blocks for beyond the next token; 0 after a refusal
    num_start: Int64  # known when it was granted
    num_sent: Int64  # of those known, that left for the client
    num_max: Int64  # prompt and output together
    next_look: Int64  # computed tokens at which the blocks that are full by then are published
    num_tail: Int64
    tenants: Int64  # numbers of `FairShares`
    attached: Bool  # the worker was told of it
    has_news: Bool  # owned blocks, or blocks to zero, that the worker was not told of
    has_first: Bool  # its request has an output token
    is_plain: Bool  # its tokens leave in a TokenBatch
    is_watched: Bool  # its tokens leave as they come, with their log-probabilities
    is_special: Bool  # more stop tokens than a slot holds: each of its tokens is looked at

    def __init__(self) -> None:
        self.ids: UInt32 = np.zeros(0, np.uint32)  # sequence ids; 0 = free
        self.numbers: UInt32 = np.zeros(0, np.uint32)  # of the requests
        self.stops: UInt32 = np.zeros((0, STOPS_MAX), np.uint32)
        self.num_stops = 0  # columns of `stops` that any slot has used
        self.tail: UInt32 = np.zeros((0, TAIL_MAX), np.dtype("<u4"))
        self.sequences: list[S | None] = []
        self.burst_ahead = 0  # `num_ahead` is at least this where it is not 0: what plans of several steps use up
        self._counts: Int64 = np.zeros((len(_COUNTS), 0), np.int64)  # the rows of these two have names
        self._flags: Bool = np.zeros((len(_FLAGS), 0), np.bool_)
        self._free: list[int] = []
        self._grow(FIRST_SLOTS)

    def __len__(self) -> int:
        return len(self.sequences) - len(self._free)

    def add(self, sequence: S, number: int, stop_tokens: Iterable[int]) -> int:
        """The lowest free slot, all counts and flags of it zero."""
        if not self._free:
            self._grow(len(self.sequences))
        slot = heappop(self._free)
        self.sequences[slot] = sequence
        self.ids[slot] = sequence.sequence_id
        self.numbers[slot] = number
        self._counts[:, slot] = 0
        self._flags[:, slot] = False
        stops = sorted(stop_tokens)
        few = stops[:STOPS_MAX]
        self.stops[slot] = few + [NO_TOKEN] * (STOPS_MAX - len(few))
        self.num_stops = max(self.num_stops, len(few))
        self.is_special[slot] = len(stops) > STOPS_MAX
        return slot

    def remove(self, slot: int) -> None:
        self.sequences[slot] = None
        self.ids[slot] = 0
        self.attached[slot] = False
        heappush(self._free, slot)

    def take_tail(self, slot: int) -> bytes:
        """Packed u32; the tail is empty then."""
        count = self.num_tail[slot]
        if not count:
            return b""
        self.num_tail[slot] = 0
        return self.tail[slot, :count].tobytes()

    def num_needed(self, slots: Int64 | slice) -> Int64:
        """[S], positions that the sequences in these slots should own blocks for now. After a refusal no more than the
        next token's."""
        ahead = self.num_ahead[slots]
        ahead = np.where(ahead > 0, np.maximum(ahead, self.burst_ahead), 0)
        needed: Int64 = np.minimum(self.num_max[slots] - 1, self.num_planned[slots] + 1 + ahead)
        return needed

    def at(self, slots: Int64) -> list[S]:
        """The sequences in these slots, none of which is free."""
        found = [self.sequences[slot] for slot in slots.tolist()]
        return [sequence for sequence in found if sequence is not None]

    def _grow(self, more: int) -> None:
        count = len(self.sequences)
        self.sequences += [None] * more
        for name in ("ids", "numbers", "stops", "tail"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros((more, *old.shape[1:]), old.dtype)]))
        for names, many in ((_COUNTS, "_counts"), (_FLAGS, "_flags")):
            old = getattr(self, many)
            new = np.concatenate([old, np.zeros((len(names), more), old.dtype)], axis=1)
            setattr(self, many, new)
            for name, row in zip(names, new, strict=True):
                setattr(self, name, row)
        self._free += range(count, count + more)
        heapify(self._free)
