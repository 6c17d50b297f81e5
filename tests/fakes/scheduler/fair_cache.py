"""A cache service for runs of many thousand steps: one worker, blocks out of a list, prefixes in a dict, LRU.

Nothing is checked here that `scheduler_index.py` checks; it is quick, and tells how much was found.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from coppice.handles import make_generation, pack_handle
from coppice.ids import BlockId, CacheEpoch, LeaseId, WorkerEpoch, WorkerId
from coppice.messages.index import (
    Acquire,
    Answer,
    AnswerBatch,
    Extend,
    Extended,
    FromClient,
    Gone,
    Grant,
    MatchHint,
    MatchHints,
    MatchQueries,
    NoCapacity,
    NoCapacityReason,
    Op,
    OpBatch,
    Publish,
    Published,
    Retain,
    Retained,
    ToClient,
    WorkerInfo,
    Workers,
)
from coppice.messages.index import Released as ReleasedAnswer
from tests.fakes.scheduler.scheduler_ledger import NAMESPACE, said_in_full

EPOCH = CacheEpoch(1)
Key = tuple[str, bytes]


@dataclass
class _Held:
    op: Acquire
    shared: list[Key]
    owned: list[int]  # block ids
    published: int
    mine: dict[int, Key] = field(default_factory=dict)  # of `owned`, by index: those that became findable


class FairCache:
    def __init__(self, worker_id: WorkerId, num_blocks: int, block_size: int, max_sequences: int = 0) -> None:
        self.block_size = block_size
        self.num_queries = 0
        self._info = WorkerInfo(
            worker_id, WorkerEpoch(1), "here:0", num_blocks, block_size, NAMESPACE, "m", True, max_sequences
        )
        self._free = list(range(num_blocks))
        self._turn = 1
        self._leases: dict[LeaseId, _Held] = {}
        self._cached: dict[Key, int] = {}
        self._pins: dict[Key, int] = {}
        self._idle: OrderedDict[Key, None] = OrderedDict()  # nobody reads them; the longest idle first

    def workers(self) -> Workers:
        return Workers(EPOCH, (self._info,))

    def take(self, message: FromClient) -> ToClient | None:
        if isinstance(message, OpBatch):
            return AnswerBatch(EPOCH, tuple(self._answer(op) for op in message.ops))
        if isinstance(message, MatchQueries):
            self.num_queries += len(message.queries)
            return MatchHints(EPOCH, tuple(self._hint(str(q.domain), q.tokens) for q in message.queries))
        return None

    def _hint(self, domain: str, tokens: bytes) -> MatchHint:
        found = len(self._match(domain, tokens)) * self.block_size
        return MatchHint((self._info.worker_id,), (found,)) if found else MatchHint((), ())

    def _answer(self, op: Op) -> Answer:
        if isinstance(op, Acquire):
            return self._acquire(op)
        held = self._leases.get(op.lease_id)
        if isinstance(op, Extend):
            return Gone(op.lease_id) if held is None else self._extend(held, op)
        if isinstance(op, Publish):
            return Gone(op.lease_id) if held is None else self._publish(held, op)
        if isinstance(op, Retain):
            return Retained(op.lease_id, 0)
        self._release(op.lease_id)
        return ReleasedAnswer(op.lease_id)

    def _match(self, domain: str, tokens: bytes) -> list[Key]:
        step = self.block_size * 4
        found = []
        for end in range(step, len(tokens) - 3, step):
            if (domain, tokens[:end]) not in self._cached:
                break
            found.append((domain, tokens[:end]))
        return found

    def _acquire(self, op: Acquire) -> Answer:
        shared = self._match(str(op.domain), op.tokens)
        for key in shared:
            self._pins[key] = self._pins.get(key, 0) + 1
            self._idle.pop(key, None)
        owned = self._take(-(-op.reserve_tokens // self.block_size) - len(shared))
        if owned is None:
            self._unpin(shared)
            return NoCapacity(op.lease_id, NoCapacityReason.POOL_FULL, 20)
        self._leases[op.lease_id] = _Held(op, shared, owned, len(shared))
        return Grant(
            lease_id=op.lease_id,
            worker_id=self._info.worker_id,
            worker_epoch=self._info.worker_epoch,
            num_cached_tokens=len(shared) * self.block_size,
            shared=self._handles([self._cached[key] for key in shared]),
            shared_seals=b"s" * 16 * len(shared),
            owned=self._handles(owned),
            zero=b"",
        )

    def _take(self, count: int) -> list[int] | None:
        if len(self._free) + len(self._idle) < count:
            return None
        while len(self._free) < count:
            key, _ = self._idle.popitem(last=False)
            self._free.append(self._cached.pop(key))
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _handles(self, blocks: list[int]) -> bytes:
        self._turn += 1
        handles = [pack_handle(BlockId(block), make_generation(EPOCH, self._turn)) for block in blocks]
        return np.array(handles, dtype="<u8").tobytes()

    def _extend(self, held: _Held, op: Extend) -> Answer:
        first = len(held.shared) + len(held.owned)
        more = self._take(max(0, -(-op.reserve_tokens // self.block_size) - first))
        if more is None:
            return NoCapacity(op.lease_id, NoCapacityReason.POOL_FULL, 20)
        held.owned += more
        return Extended(op.lease_id, first, self._handles(more), b"")

    def _publish(self, held: _Held, op: Publish) -> Answer:
        op = said_in_full(op, held.op.tokens, self.block_size)
        step = self.block_size * 4
        domain = str(held.op.domain)
        known = held.shared[-1][1] if held.shared else b""
        if held.mine:
            known = max((key[1] for key in held.mine.values()), key=len)
        known = known[: op.first_block * step] + op.tokens
        for end in range(op.first_block * step + step, len(known) + 1, step):
            index = end // step - 1 - len(held.shared)
            key = (domain, known[:end])
            held.published = max(held.published, end // step)
            if index >= 0 and key not in self._cached:
                self._cached[key] = held.owned[index]
                self._pins[key] = 1
                held.mine[index] = key
        return Published(op.lease_id, held.published, b"", b"")

    def _unpin(self, keys: list[Key]) -> None:
        for key in reversed(keys):
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                self._idle[key] = None

    def _release(self, lease_id: LeaseId) -> None:
        held = self._leases.pop(lease_id, None)
        if held is None:
            return
        self._unpin([held.mine[index] for index in sorted(held.mine)])
        self._unpin(held.shared)
        self._free += [block for index, block in enumerate(held.owned) if index not in held.mine]
