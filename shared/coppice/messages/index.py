"""Messages between a scheduler (or any other client) and the cache service.

    client -> cache   OpBatch, Reattach, LeaseSet, MatchQueries, Succeed, Yielded, Served
    cache -> client   AnswerBatch, Workers, Reattached, LeaseDigest, Wake, Reclaim, MatchHints, TenantsVersion, CellNews

Every op is idempotent under its lease id: a repeated one gets the same answer and changes nothing. Answers of a batch
stand in the order of its ops. Tokens are packed u32, handles packed u64, seals packed 16 bytes, all little endian.
"""

from __future__ import annotations

from enum import Enum

from coppice.ids import U32, U64, CacheEpoch, DomainId, LeaseId, Namespace, WorkerEpoch, WorkerId
from coppice.messages.cell import CellNews, Served
from coppice.messages.ownership import Succeed, Yielded
from coppice.messages.record import Message, PackedHandles, PackedSeals, PackedU32, Record
from coppice.messages.reuse import Outcome, Reuse


class NoCapacityReason(Enum):
    POOL_FULL = "pool_full"  # every block is held or pinned; will pass
    DOMAIN_MAXIMUM = "domain_maximum"  # the domain holds its maximum; passes when it gives blocks back
    NEVER_FITS = "never_fits"  # more blocks than the pool or the domain's maximum can ever give
    NO_WORKER = "no_worker"  # no candidate is registered with an open ledger
    DOMAIN_UNKNOWN = "domain_unknown"  # the tenants file here has no such domain; passes when a newer one has it


class NotPublishedReason(Enum):
    TREE_GONE = "tree_gone"  # the tree was invalidated, or the lease was re-attached after a restart
    DOMAIN_DISABLED = "domain_disabled"


class Candidate(Record, frozen=True):
    worker_id: WorkerId
    load_cost: U64  # in tokens of prefill work that stand before this request there


class Acquire(Message, frozen=True):
    """Match + pin + reserve, atomically. `reserve_tokens` >= number of tokens: blocks for that many positions."""

    lease_id: LeaseId
    domain: DomainId
    namespace: Namespace
    tokens: PackedU32
    reserve_tokens: U64
    candidates: tuple[Candidate, ...]
    traceparent: str = ""  # W3C trace context of the request; empty = not traced
    reuse: Reuse = Reuse.UNKNOWN
    may_wait: bool = False  # may be answered with Pending
    wants_copy: bool = False  # the grant may name a partly matching block to copy from
    skip_match: bool = False  # every token will be computed: share nothing, own all blocks; it publishes as others do
    call_kind: U32 = 0  # below CALL_KINDS; the cache learns how often prompts of each come again. 0: not told apart


class Extend(Message, frozen=True):
    """Own enough blocks for `reserve_tokens` positions in all. All or nothing."""

    lease_id: LeaseId
    reserve_tokens: U64


class Publish(Message, frozen=True):
    """The lease's blocks from index `first_block` on are full and their writing step has completed.

    The first `num_named_blocks` of them have the tokens that the lease's Acquire named: the cache service kept those.
    Of a lease that came back after a restart it has none. The blocks that follow them have `tokens`.
    """

    lease_id: LeaseId
    first_block: U32  # index within the sequence; at most the number of blocks matched or published so far
    tokens: PackedU32  # whole blocks
    num_named_blocks: U32 = 0


class Release(Message, frozen=True):
    """Give everything back. Said only after the result of the step whose plan removed the sequence."""

    lease_id: LeaseId
    reuse: Reuse = Reuse.UNKNOWN
    outcome: Outcome = Outcome.UNKNOWN


class Abandon(Message, frozen=True):
    """Release through a fence: the worker cannot be asked."""

    lease_id: LeaseId


class Distrust(Message, frozen=True):
    """The worker refused these blocks, which the lease shares: they and all that follows them leave the tree.

    Whoever holds them keeps them. Handles that the lease's path does not have are ignored.
    """

    lease_id: LeaseId
    handles: PackedHandles


class Retain(Message, frozen=True):
    """Keep the lease's published blocks that cover tokens [first_token, end_token) for a while.

    They are evicted after everything of lower priority in their domain. Priority 0 ends an earlier retention.
    """

    lease_id: LeaseId
    first_token: U64
    end_token: U64
    priority: U32  # 0 to RETAIN_PRIORITY_MAX
    duration_ms: U64


RETAIN_PRIORITY_MAX = 100

Op = Acquire | Extend | Publish | Release | Abandon | Distrust | Retain


class Grant(Message, frozen=True):
    lease_id: LeaseId
    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    num_cached_tokens: U64  # = tokens covered by `shared`
    shared: PackedHandles  # handles, read only
    shared_seals: PackedSeals
    owned: PackedHandles  # handles, writable
    zero: PackedHandles  # the owned handles whose blocks must be zeroed before the first write (I15)
    copy_source: PackedHandles = (
        b""  # one handle: its first `num_copy_tokens` tokens continue the match, the rest differs.
    )
    copy_seal: PackedSeals = (
        b""  # Held until the lease publishes past it or ends; to be copied into the first owned block.
    )
    num_copy_tokens: U64 = 0


class Pending(Message, frozen=True):
    """Another live lease of the domain is computing `num_tokens` of this prompt. Nothing is held.

    A Wake says when to ask again, under the same lease id; without one ask again after `retry_after_ms` at the latest.
    """

    lease_id: LeaseId
    num_tokens: U64
    retry_after_ms: U32


class NoCapacity(Message, frozen=True):
    """Nothing is held. A domain below its guarantee is owed the blocks for as long as the op is repeated under its id;
    a Release ends that, too."""

    lease_id: LeaseId
    reason: NoCapacityReason
    retry_after_ms: U32


class Extended(Message, frozen=True):
    lease_id: LeaseId
    first_block: U32  # index within the sequence of the first handle in `owned`
    owned: PackedHandles  # the handles that this op added (empty when the lease already had enough)
    zero: PackedHandles


class Published(Message, frozen=True):
    lease_id: LeaseId
    num_published_blocks: U32  # blocks of the sequence that are findable now, counted from its start
    handles: PackedHandles  # the lease's own blocks that became CACHED by this op
    seals: PackedSeals  # their seals; the scheduler takes both to the worker with its next plan


class NotPublished(Message, frozen=True):
    lease_id: LeaseId
    reason: NotPublishedReason


class Released(Message, frozen=True):
    """Also the answer to a release of an unknown or finished lease: success without effect."""

    lease_id: LeaseId


class Distrusted(Message, frozen=True):
    """Also the answer for a lease that is unknown or finished: success without effect."""

    lease_id: LeaseId


class Retained(Message, frozen=True):
    lease_id: LeaseId
    num_tokens: U64  # of the range, published by now and retained


class Gone(Message, frozen=True):
    """The answer to `Extend` and `Publish` of an unknown, finished, expired or displaced lease."""

    lease_id: LeaseId


class Invalid(Message, frozen=True):
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

ANSWERS: dict[type[Op], tuple[type[Answer], ...]] = {  # that an op may get
    Acquire: (Grant, Pending, NoCapacity, Gone, Invalid),
    Extend: (Extended, NoCapacity, Gone, Invalid),
    Publish: (Published, NotPublished, Gone, Invalid),
    Release: (Released, Invalid),
    Abandon: (Released, Invalid),
    Distrust: (Distrusted, Invalid),
    Retain: (Retained, Gone, Invalid),
}


class OpBatch(Message, frozen=True):
    ops: tuple[Op, ...]


class AnswerBatch(Message, frozen=True):
    """Answers to one OpBatch, in its order; batches are answered in order."""

    cache_epoch: CacheEpoch
    answers: tuple[Answer, ...]


class WorkerInfo(Record, frozen=True):
    """A registered worker, as the cache service tells it to schedulers."""

    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    address: str  # HOST:PORT or unix:/PATH of its sessions
    num_blocks: U32
    block_size: U32
    namespace: Namespace
    model: str
    open: bool  # False while its ledger waits for re-attachment and fences
    max_sequences: U32 = 0  # attached at once; 0 = not said, here and in the next two
    max_step_tokens: U32 = 0  # computed in one step
    max_context: U32 = 0  # tokens of one sequence
    draining: bool = False  # not a candidate for new leases
    num_host_blocks: U32 = 0
    voucher: bytes = b""  # for the epoch of the session that is told this, at this worker; in its Hello there
    is_owned: bool = True  # the session that is told this plans for it; others have it while this says False
    yields: bool = (
        False  # it is wanted for another: nothing new begins there, and `Yielded` follows when nothing is left
    )


class Workers(Message, frozen=True):
    """All registered workers; sent on attach and on every change."""

    cache_epoch: CacheEpoch
    workers: tuple[WorkerInfo, ...]


class LeaseClaim(Record, frozen=True):
    """What a scheduler says of one live lease after the cache service lost its ledger."""

    lease_id: LeaseId
    domain: DomainId
    namespace: Namespace
    worker_id: WorkerId
    worker_epoch: WorkerEpoch
    shared: PackedHandles
    shared_seals: PackedSeals
    owned: PackedHandles


DEAD_EPOCHS_MAX = 8  # that a session remembers of each worker, the latest; a worker that lives is at one of these


class DeadWorker(Record, frozen=True):
    """A worker epoch of which the session was told that it is over. It gave up what it had there, and claims none."""

    worker_id: WorkerId
    worker_epoch: WorkerEpoch


class Reattach(Message, frozen=True):
    """All live leases of the session, sent once per fresh attachment under an old scheduler epoch."""

    claims: tuple[LeaseClaim, ...]
    dead_workers: tuple[DeadWorker, ...] = ()


class Reattached(Message, frozen=True):
    """Verdict on claims; several of these may answer one Reattach (one per worker, as workers register)."""

    cache_epoch: CacheEpoch
    accepted: tuple[LeaseId, ...]
    refused: tuple[LeaseId, ...]
    # Per accepted lease, blocks from its start that are findable: it publishes from there. () = these leases have no
    # place in a tree and do not publish; after a restart another Reattached may say otherwise when the worker opens.
    settled_blocks: tuple[U32, ...] = ()


class LeaseDigest(Message, frozen=True):
    """Heartbeat of the cache service: count and XOR of `lease_hash` over the session's live leases.

    Comparable only by a client that has no unanswered op; it answers a difference with its LeaseSet.
    """

    count: U64
    digest: U64


class LeaseSet(Message, frozen=True):
    """Every lease that the client believes in. The cache drops its others (through a fence) and names the unknown."""

    lease_ids: tuple[LeaseId, ...]


class Wake(Message, frozen=True):
    """These leases were answered with Pending; it is time to ask again."""

    cache_epoch: CacheEpoch
    lease_ids: tuple[LeaseId, ...]


class Reclaim(Message, frozen=True):
    """A domain below its guarantee waits for blocks that `domain` has borrowed: preempt, then release.

    `num_blocks` is all that this session still has to give back, what is on its way included: said again, it asks for
    nothing twice. Leases of a session that does not are taken away through a fence in the end.
    """

    cache_epoch: CacheEpoch
    worker_id: WorkerId
    domain: DomainId
    num_blocks: U32


class MatchQuery(Record, frozen=True):
    domain: DomainId
    namespace: Namespace
    tokens: PackedU32


class MatchQueries(Message, frozen=True):
    """What would acquires of these prompts find? Answered by MatchHints, in order; nothing is reserved."""

    queries: tuple[MatchQuery, ...]


class MatchHint(Record, frozen=True):
    """Workers where something was found, and how much."""

    worker_ids: tuple[WorkerId, ...]
    num_cached_tokens: tuple[U64, ...]


class MatchHints(Message, frozen=True):
    """One hint per query of one MatchQueries."""

    cache_epoch: CacheEpoch
    hints: tuple[MatchHint, ...]


class TenantsVersion(Message, frozen=True):
    """Of the tenants file that counts at the cache service; said at each connection and on every change.

    The services compare it, and their cores never hear of it.
    """

    version: str  # empty: there is no file, and any domain is served


def lease_hash(lease_id: LeaseId) -> int:
    """64-bit share of one lease in a LeaseDigest. Client-chosen ids are random enough to be folded."""
    return int.from_bytes(lease_id[:8], "little") ^ int.from_bytes(lease_id[8:], "little")


FromClient = OpBatch | Reattach | LeaseSet | MatchQueries | Succeed | Yielded | Served
ToClient = AnswerBatch | Workers | Reattached | LeaseDigest | Wake | Reclaim | MatchHints | TenantsVersion | CellNews
