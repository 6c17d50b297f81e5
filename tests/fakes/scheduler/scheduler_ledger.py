"""What the fake cache service keeps: findable blocks, leases, one ledger per worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from msgspec.structs import replace

from coppice.ids import LeaseId, Namespace, WorkerEpoch, WorkerId
from coppice.messages.index import Acquire, Extended, Grant, LeaseClaim, Publish

NAMESPACE = Namespace(b"fake")


def packed(handles: list[int]) -> bytes:
    return np.array(handles, dtype="<u8").tobytes()


def seal_of(domain: str, tokens: bytes) -> bytes:
    return blake2b(tokens, digest_size=16, person=b"fake", salt=domain.encode()[:16]).digest()


def said_in_full(op: Publish, acquired: bytes, block_size: int) -> Publish:
    """The same with all of its tokens. `acquired`: those of the lease's Acquire; none where they are not known any
    more."""
    start, step = op.first_block * block_size * 4, block_size * 4
    named = acquired[start : start + op.num_named_blocks * step]
    assert len(named) == op.num_named_blocks * step, "nobody knows tokens that it counts on"
    return replace(op, tokens=named + op.tokens, num_named_blocks=0)


@dataclass(eq=False)
class Entry:
    """One findable block."""

    handle: int
    seal: bytes
    pins: set[LeaseId] = field(default_factory=set)


@dataclass(eq=False)
class HeldLease:
    op: Acquire | LeaseClaim
    worker_id: WorkerId
    tokens: bytes  # covered by shared and published blocks
    shared: list[int]
    owned: list[int]
    grant: Grant | None = None
    published: int = 0
    last_extended: dict[int, Extended] = field(default_factory=dict)
    findable: bool = True  # False: re-attached after a restart


@dataclass(eq=False)
class Ledger:
    """Blocks of one worker."""

    epoch: WorkerEpoch
    num_blocks: int
    free: list[int] = field(default_factory=list)
    counters: dict[int, int] = field(default_factory=dict)
    cached: dict[tuple[str, bytes], Entry] = field(default_factory=dict)
    open: bool = True
