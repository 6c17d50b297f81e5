"""Messages between a scheduler (or any other client) and the cache service.

    client -> cache   OpBatch, Reattach, LeaseSet
    cache -> client   AnswerBatch, Workers, Reattached, LeaseDigest

Every op is idempotent under its lease id: a repeated one gets the same answer and changes nothing. Answers of a batch
stand in the order of its ops. Tokens are packed u32, handles packed u64, seals packed 16 bytes, all little endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from coppice.ids import CacheEpoch, DomainId, LeaseId, Namespace, WorkerEpoch, WorkerId


class NoCapacityReason(Enum):
    POOL_FULL = "pool_full"  # every block is held or pinned; will pass
    DOMAIN_MAXIMUM = "domain_maximum"  # the domain holds its maximum; passes when it gives blocks back
    NEVER_FITS = "never_fits"  # more blocks than the pool or the domain's maximum can ever give
    NO_WORKER = "no_worker"  # no candidate is registered with an open ledger


class NotPublishedReason(Enum):
    TREE_GONE = "tree_gone"  # the tree was invalidated, or the lease was re-attached after a restart
    DOMAIN_DISABLED = "domain_disabled"


@dataclass(frozen=True, slots=True)
class Candidate:
    worker_id: WorkerId
    load_cost: int  # in tokens of prefill work that stand before this request there


@dataclass(frozen=True, slots=True)
class Acquire:
    """Match + pin + reserve, atomically. `reserve_tokens` >= number of tokens: blocks for that many positions."""

    lease_id: LeaseId
    domain: DomainId
    namespace: Namespace
    tokens: bytes
    reserve_tokens: int
    candidates: tuple[Candidate, ...]
    traceparent: str = ""  # W3C trace context of the request; empty = not traced


@dataclass(frozen=True, slots=True)
class Extend:
    """Own enough blocks for `reserve_tokens` positions in all. All or nothing."""

    lease_id: LeaseId
    reserve_tokens: int


@dataclass(frozen=True, slots=True)
class Publish:
    """The lease's blocks from index `first_block` on are full with `tokens` and their writing step has completed."""

    lease_id: LeaseId
    first_block: int  # index within the sequence; at most the number of blocks matched or published so far
    tokens: bytes  # whole blocks


@dataclass(frozen=True, slots=True)
class Release:
    """Give everything back. Said only after the result of the step whose plan removed the sequence."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class Abandon:
    """Release through a fence: the worker cannot be asked."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class Distrust:
    """The worker refused these blocks, which the lease shares: they and all that follows them leave the tree.

    Whoever holds them keeps them. Handles that the lease's path does not have are ignored.
    """

    lease_id: LeaseId
    handles: bytes


Op = Acquire | Extend | Publish | Release | Abandon | Distrust


@dataclass(frozen=True, slots=True)
class Grant:
    lease_id: LeaseId
    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    num_cached_tokens: int  # = tokens covered by `shared`
    shared: bytes  # handles, read only
    shared_seals: bytes
    owned: bytes  # handles, writable
    zero: bytes  # the owned handles whose blocks must be zeroed before the first write (I15)


@dataclass(frozen=True, slots=True)
class NoCapacity:
    lease_id: LeaseId
    reason: NoCapacityReason
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class Extended:
    lease_id: LeaseId
    first_block: int  # index within the sequence of the first handle in `owned`
    owned: bytes  # the handles that this op added (empty when the lease already had enough)
    zero: bytes


@dataclass(frozen=True, slots=True)
class Published:
    lease_id: LeaseId
    num_published_blocks: int  # blocks of the sequence that are findable now, counted from its start
    handles: bytes  # the lease's own blocks that became CACHED by this op
    seals: bytes  # their seals; the scheduler takes both to the worker with its next plan


@dataclass(frozen=True, slots=True)
class NotPublished:
    lease_id: LeaseId
    reason: NotPublishedReason


@dataclass(frozen=True, slots=True)
class Released:
    """Also the answer to a release of an unknown or finished lease: success without effect."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class Distrusted:
    """Also the answer for a lease that is unknown or finished: success without effect."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class Gone:
    """The answer to `Extend` and `Publish` of an unknown, finished, expired or displaced lease."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class Invalid:
    """The op itself was wrong (a length, an unknown domain, a gap in blocks). Nothing changed."""

    lease_id: LeaseId
    message: str


Answer = Grant | NoCapacity | Extended | Published | NotPublished | Released | Distrusted | Gone | Invalid


@dataclass(frozen=True, slots=True)
class OpBatch:
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class AnswerBatch:
    """Answers to one OpBatch, in its order; batches are answered in order."""

    cache_epoch: CacheEpoch
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A registered worker, as the cache service tells it to schedulers."""

    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    address: str  # host:port of its gRPC endpoint
    num_blocks: int
    block_size: int
    namespace: Namespace
    model: str
    open: bool  # False while its ledger waits for re-attachment and fences
    max_sequences: int = 0  # attached at once; 0 = not said, here and in the next two
    max_step_tokens: int = 0  # computed in one step
    max_context: int = 0  # tokens of one sequence
    draining: bool = False  # not a candidate for new leases


@dataclass(frozen=True, slots=True)
class Workers:
    """All registered workers; sent on attach and on every change."""

    cache_epoch: CacheEpoch
    workers: tuple[WorkerInfo, ...]


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """What a scheduler says of one live lease after the cache service lost its ledger."""

    lease_id: LeaseId
    domain: DomainId
    namespace: Namespace
    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    shared: bytes
    shared_seals: bytes
    owned: bytes


@dataclass(frozen=True, slots=True)
class Reattach:
    """All live leases of the session, sent once per fresh attachment under an old scheduler epoch."""

    claims: tuple[LeaseClaim, ...]


@dataclass(frozen=True, slots=True)
class Reattached:
    """Verdict on claims; several of these may answer one Reattach (one per worker, as workers register)."""

    cache_epoch: CacheEpoch
    accepted: tuple[LeaseId, ...]
    refused: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class LeaseDigest:
    """Heartbeat of the cache service: count and XOR of `lease_hash` over the session's live leases.

    Comparable only by a client that has no unanswered op; it answers a difference with its LeaseSet.
    """

    count: int
    digest: int


@dataclass(frozen=True, slots=True)
class LeaseSet:
    """Every lease that the client believes in. The cache drops its others (through a fence) and names the unknown."""

    lease_ids: tuple[LeaseId, ...]


def lease_hash(lease_id: LeaseId) -> int:
    """64-bit share of one lease in a LeaseDigest. Client-chosen ids are random enough to be folded."""
    return int.from_bytes(lease_id[:8], "little") ^ int.from_bytes(lease_id[8:], "little")


FromClient = OpBatch | Reattach | LeaseSet
ToClient = AnswerBatch | Workers | Reattached | LeaseDigest
