"""Messages between a scheduler (or any other client) and the cache service.

    client -> cache   OpBatch, Reattach, LeaseSet, MatchQueries
    cache -> client   AnswerBatch, Workers, Reattached, LeaseDigest, Wake, Reclaim, MatchHints

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


class Reuse(Enum):
    """What the client knows of the future of a prompt; eviction weighs it."""

    UNKNOWN = "unknown"
    LIKELY = "likely"  # its conversation stays open, or an agent loops over it
    UNLIKELY = "unlikely"  # one of a kind, or its conversation is over


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
    reuse: Reuse = Reuse.UNKNOWN
    may_wait: bool = False  # may be answered with Pending
    wants_copy: bool = False  # the grant may name a partly matching block to copy from
    skip_match: bool = False  # every token will be computed: share nothing, own all blocks; it publishes as others do


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
    reuse: Reuse = Reuse.UNKNOWN


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


@dataclass(frozen=True, slots=True)
class Retain:
    """Keep the lease's published blocks that cover tokens [first_token, end_token) for a while.

    They are evicted after everything of lower priority in their domain. Priority 0 ends an earlier retention.
    """

    lease_id: LeaseId
    first_token: int
    end_token: int
    priority: int  # 0 to RETAIN_PRIORITY_MAX
    duration_ms: int


RETAIN_PRIORITY_MAX = 100

Op = Acquire | Extend | Publish | Release | Abandon | Distrust | Retain


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
    copy_source: bytes = b""  # one handle: its first `num_copy_tokens` tokens continue the match, the rest differs.
    copy_seal: bytes = b""  # Held until the lease publishes past it or ends; to be copied into the first owned block.
    num_copy_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Pending:
    """Another live lease of the domain is computing `num_tokens` of this prompt. Nothing is held.

    A Wake says when to ask again, under the same lease id; without one ask again after `retry_after_ms` at the latest.
    """

    lease_id: LeaseId
    num_tokens: int
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class NoCapacity:
    """Nothing is held. A domain below its guarantee is owed the blocks for as long as the op is repeated under its id;
    a Release ends that, too."""

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
class Retained:
    lease_id: LeaseId
    num_tokens: int  # of the range, published by now and retained


@dataclass(frozen=True, slots=True)
class Gone:
    """The answer to `Extend` and `Publish` of an unknown, finished, expired or displaced lease."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class Invalid:
    """The op itself was wrong (a length, an unknown domain, a gap in blocks). Nothing changed."""

    lease_id: LeaseId
    message: str


Answer = (
    Grant
    | Pending
    | NoCapacity
    | Extended
    | Published
    | NotPublished
    | Released
    | Distrusted
    | Retained
    | Gone
    | Invalid
)


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
    num_host_blocks: int = 0


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


DEAD_EPOCHS_MAX = 8  # that a session remembers of each worker, the latest; a worker that lives is at one of these


@dataclass(frozen=True, slots=True)
class DeadWorker:
    """A worker epoch of which the session was told that it is over. It gave up what it had there, and claims none."""

    worker_id: WorkerId
    worker_epoch: WorkerEpoch


@dataclass(frozen=True, slots=True)
class Reattach:
    """All live leases of the session, sent once per fresh attachment under an old scheduler epoch."""

    claims: tuple[LeaseClaim, ...]
    dead_workers: tuple[DeadWorker, ...] = ()


@dataclass(frozen=True, slots=True)
class Reattached:
    """Verdict on claims; several of these may answer one Reattach (one per worker, as workers register)."""

    cache_epoch: CacheEpoch
    accepted: tuple[LeaseId, ...]
    refused: tuple[LeaseId, ...]
    # Per accepted lease, blocks from its start that are findable: it publishes from there. () = these leases have no
    # place in a tree and do not publish; after a restart another Reattached may say otherwise when the worker opens.
    settled_blocks: tuple[int, ...] = ()


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


@dataclass(frozen=True, slots=True)
class Wake:
    """These leases were answered with Pending; it is time to ask again."""

    cache_epoch: CacheEpoch
    lease_ids: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class Reclaim:
    """A domain below its guarantee waits for blocks that `domain` has borrowed: preempt, then release.

    `num_blocks` is all that this session still has to give back, what is on its way included: said again, it asks for
    nothing twice. Leases of a session that does not are taken away through a fence in the end.
    """

    cache_epoch: CacheEpoch
    worker_id: WorkerId
    domain: DomainId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class MatchQuery:
    domain: DomainId
    namespace: Namespace
    tokens: bytes


@dataclass(frozen=True, slots=True)
class MatchQueries:
    """What would acquires of these prompts find? Answered by MatchHints, in order; nothing is reserved."""

    queries: tuple[MatchQuery, ...]


@dataclass(frozen=True, slots=True)
class MatchHint:
    """Workers where something was found, and how much."""

    worker_ids: tuple[WorkerId, ...]
    num_cached_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MatchHints:
    """One hint per query of one MatchQueries."""

    cache_epoch: CacheEpoch
    hints: tuple[MatchHint, ...]


def lease_hash(lease_id: LeaseId) -> int:
    """64-bit share of one lease in a LeaseDigest. Client-chosen ids are random enough to be folded."""
    return int.from_bytes(lease_id[:8], "little") ^ int.from_bytes(lease_id[8:], "little")


FromClient = OpBatch | Reattach | LeaseSet | MatchQueries
ToClient = AnswerBatch | Workers | Reattached | LeaseDigest | Wake | Reclaim | MatchHints
