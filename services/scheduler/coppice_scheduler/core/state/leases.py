"""Leases and the ops about them: what was asked, what was answered, what must be asked again.

    ASKED --Grant--> LIVE --release--> RELEASING --Released--> (forgotten)
      |                |                                        ^
      +-- NoCapacity --+------------ Gone, refused -------------+
          Pending

A request that asked in vain asks again under the same id: the cache service may remember it, as one who waits for a
flight or as one who is owed its guarantee.

Batches are answered in order, so the oldest unanswered batch is the one that an AnswerBatch answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from coppice.handles import HANDLE_BYTES
from coppice.ids import TOKEN_BYTES, CacheEpoch, DomainId, LeaseId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import (
    ANSWERS,
    Abandon,
    Acquire,
    Answer,
    AnswerBatch,
    DeadWorker,
    Distrust,
    Extend,
    FromClient,
    Grant,
    LeaseClaim,
    LeaseDigest,
    LeaseSet,
    Op,
    OpBatch,
    Publish,
    Reattach,
    Release,
    Retain,
    lease_hash,
)
from coppice.messages.reuse import Outcome, Reuse

OPS_PER_BATCH_MAX = 1024  # the cache service refuses batches beyond its own, higher, limit
OPS_BYTES_MAX = 8 << 20  # of tokens in one batch, but for its first op, well below a message's limit


def _fits(op: Op, answer: Answer) -> bool:
    return op.lease_id == answer.lease_id and isinstance(answer, ANSWERS[type(op)])


class LeaseState(Enum):
    ASKED = "asked"
    LIVE = "live"
    RELEASING = "releasing"  # its Release or Abandon is on the way
    DEAD = "dead"  # forgotten, here and there


@dataclass(slots=True, eq=False)
class Lease:
    """One claim at the cache service."""

    lease_id: LeaseId
    domain: DomainId
    namespace: Namespace
    state: LeaseState = LeaseState.ASKED
    candidates: tuple[WorkerId, ...] = ()  # that the Acquire names: any of them may be the one
    names_all: bool = True  # that could take it: a refusal says that nobody has room
    expected_worker: WorkerId = WorkerId("")  # where its load is counted until the answer says where it is
    num_prefill_tokens: int = 0
    reserve_asked: int = 0  # tokens of the Acquire
    past_gate: bool = False  # asked for what is its domain's by right
    asked_before: bool = False  # under this id, in vain
    worker_id: WorkerId = WorkerId("")
    worker_epoch: WorkerEpoch = WorkerEpoch(0)
    block_size: int = 1
    shared: bytes = b""
    shared_seals: bytes = b""
    owned: bytearray = field(default_factory=bytearray)
    copy_source: bytes = b""  # one handle, of the block whose beginning is copied into the first owned one
    copy_seal: bytes = b""
    num_copy_tokens: int = 0
    reserved_tokens: int = 0
    extend_asked: int = 0  # tokens of the Extend without an answer; 0 = none
    prompt: bytes = b""  # of the request, packed u32
    output: bytearray = field(default_factory=bytearray)  # of the request: the same object, which grows
    num_named_tokens: int = 0  # of the Acquire, while the cache service is sure to have them; 0 after a Reattach
    publishable: bool = True
    num_full_blocks: int = 0  # full, and the step that wrote the last of them has completed
    num_publish_sent: int = 0
    num_published: int = 0
    reuse: Reuse = Reuse.UNKNOWN  # said with its Release
    outcome: Outcome = Outcome.UNKNOWN  # that, too
    retain_tokens: int = 0  # that are to be kept once they are findable, for
    retain_ms: int = 0
    awaits_verdict: bool = False  # claimed in a Reattach that is not answered yet

    @property
    def num_shared_blocks(self) -> int:
        return len(self.shared) // HANDLE_BYTES

    @property
    def num_owned_blocks(self) -> int:
        return len(self.owned) // HANDLE_BYTES

    @property
    def num_found_tokens(self) -> int:
        """Whose KV is in shared blocks, or is copied."""
        return self.num_shared_blocks * self.block_size + self.num_copy_tokens

    def take_grant(self, grant: Grant, block_size: int) -> None:
        self.state = LeaseState.LIVE
        self.worker_id = grant.worker_id
        self.worker_epoch = grant.worker_epoch
        self.block_size = block_size
        self.shared = grant.shared
        self.shared_seals = grant.shared_seals
        self.owned = bytearray(grant.owned)
        self.reserved_tokens = (self.num_shared_blocks + self.num_owned_blocks) * block_size
        self.num_full_blocks = self.num_publish_sent = self.num_published = self.num_shared_blocks

    def take_blocks(self, first_block: int, owned: bytes) -> bytes:
        """Append what is new of an Extended answer and return it. A repeated answer adds nothing."""
        have = self.num_shared_blocks + self.num_owned_blocks
        if first_block > have:
            return b""
        new = owned[(have - first_block) * HANDLE_BYTES :]
        self.owned += new
        self.reserved_tokens += len(new) // HANDLE_BYTES * self.block_size
        return new

    def publication(self) -> Publish:
        """Of all blocks that are full and were not said yet. Those that the Acquire named are only counted."""
        first, end = self.num_publish_sent, self.num_full_blocks
        named = max(0, min(end, self.num_named_tokens // self.block_size) - first)
        start, stop = ((block * self.block_size) * TOKEN_BYTES for block in (first + named, end))
        length = len(self.prompt)
        tokens = self.prompt[start:stop] + self.output[max(0, start - length) : max(0, stop - length)]
        return Publish(self.lease_id, first, tokens, named)

    def claim(self) -> LeaseClaim:
        return LeaseClaim(
            lease_id=self.lease_id,
            domain=self.domain,
            namespace=self.namespace,
            worker_id=self.worker_id,
            worker_epoch=self.worker_epoch,
            shared=self.shared,
            shared_seals=self.shared_seals,
            owned=bytes(self.owned),
        )


class LeaseTable:
    """Every lease that is asked for or held, and the ops on their way."""

    def __init__(self, instance: bytes, retain_priority: int) -> None:
        self._instance = instance
        self._retain_priority = retain_priority
        self._next_lease = 1
        self.epoch = SchedulerEpoch(0)
        self.cache_epoch = CacheEpoch(0)
        self.connected = False
        self.leases: dict[LeaseId, Lease] = {}
        self.unanswered: deque[tuple[Op, ...]] = deque()
        self.to_publish: dict[LeaseId, Lease] = {}
        self.to_retain: dict[LeaseId, Lease] = {}
        self.num_awaiting_verdict = 0
        self.num_live = 0
        self.digest = 0
        self._abandoned: dict[LeaseId, LeaseClaim] = {}  # or lost; their sequences may still run, whatever was answered
        self._first: list[FromClient] = []  # before any op: Reattach, LeaseSet
        self._settling: list[Op] = []  # Acquires asked again, Releases, Abandons, Distrusts

    def open(self, domain: DomainId, namespace: Namespace, asked_under: LeaseId) -> Lease:
        """A lease that is to be asked for, under the id of an earlier Acquire without a grant or a new one."""
        lease_id = asked_under
        if not lease_id:
            lease_id = LeaseId(self._instance + self._next_lease.to_bytes(8, "little"))
            self._next_lease += 1
        assert lease_id not in self.leases
        lease = Lease(lease_id, domain, namespace, asked_before=bool(asked_under))
        self.leases[lease_id] = lease
        return lease

    def disown(self, lease_id: LeaseId) -> None:
        """It was asked for in vain and will not be again: whatever the cache service remembers of it may go."""
        self._settling.append(Release(lease_id))

    def grant(self, lease: Lease, grant: Grant, block_size: int) -> None:
        assert lease.state is LeaseState.ASKED
        lease.take_grant(grant, block_size)
        if lease.retain_tokens >= block_size:
            self.to_retain[lease.lease_id] = lease
        self.num_live += 1
        self.digest ^= lease_hash(lease.lease_id)

    def release(self, lease: Lease) -> None:
        self._give_back(lease, Release(lease.lease_id, lease.reuse, lease.outcome))

    def abandon(self, lease: Lease) -> None:
        """Its sequence may run on where nobody reaches it. Until it is known not to, a cache service that lost its
        ledger has to hear of the lease, or it would call the blocks free."""
        self._claim_on(lease)
        self._give_back(lease, Abandon(lease.lease_id))

    def lost(self, lease: Lease) -> None:
        """The cache service fences it without being asked; its sequence may run until then."""
        self._claim_on(lease)

    def _claim_on(self, lease: Lease) -> None:
        if lease.state is LeaseState.LIVE:
            self._abandoned[lease.lease_id] = lease.claim()

    def stopped(self, lease: Lease) -> None:
        """No step can touch its blocks any more."""
        self._abandoned.pop(lease.lease_id, None)

    def distrust(self, lease: Lease, handles: bytes) -> None:
        """The worker refused these shared blocks: nobody may find them again."""
        if lease.state is LeaseState.LIVE:
            self._settling.append(Distrust(lease.lease_id, handles))

    def _give_back(self, lease: Lease, op: Op) -> None:
        if lease.state is not LeaseState.LIVE:
            return
        lease.state = LeaseState.RELEASING
        self._judged(lease)
        self._settling.append(op)

    def forget(self, lease: Lease) -> None:
        """The cache service does not hold it (any more)."""
        if lease.state is LeaseState.DEAD:
            return
        if lease.state is not LeaseState.ASKED:
            self.num_live -= 1
            self.digest ^= lease_hash(lease.lease_id)
        lease.state = LeaseState.DEAD
        self._judged(lease)
        del self.leases[lease.lease_id]
        self.to_publish.pop(lease.lease_id, None)
        self.to_retain.pop(lease.lease_id, None)

    def accept(self, lease: Lease, num_settled: int | None) -> None:
        """A claim was accepted. `num_settled` blocks of it are findable; None: it has no place in a tree (yet).

        What we know to be published is published again where the cache service lost it; and where it knows more than
        we do, once more too, because the worker has to hear of the seals.
        """
        self._judged(lease)
        lease.publishable = num_settled is not None
        if num_settled is None:
            self.to_publish.pop(lease.lease_id, None)
        else:
            lease.num_published = lease.num_publish_sent = min(lease.num_published, num_settled)
            self._note_full(lease)

    def _judged(self, lease: Lease) -> None:
        if lease.awaits_verdict:
            lease.awaits_verdict = False
            self.num_awaiting_verdict -= 1

    # --- attachment

    def forget_session(self) -> None:
        """Another scheduler epoch: every lease of the old one is dead, every op about them is moot."""
        for lease in list(self.leases.values()):
            self.forget(lease)
        self.unanswered.clear()
        self._first.clear()
        self._settling.clear()
        self._abandoned.clear()

    def reattach(self, dead_workers: tuple[DeadWorker, ...]) -> None:
        """The link started over: claim what lives, say what is given up, ask again what has no answer.

        An Extend or a Publish is asked again out of the lease's state, once its claim was accepted: before that the
        cache service may not know the lease.
        """
        ops = [op for batch in self.unanswered for op in batch]
        self.unanswered.clear()
        self._first.clear()
        claims = []
        for lease in self.leases.values():
            lease.extend_asked = 0
            if lease.state is not LeaseState.LIVE:
                self.to_publish.pop(lease.lease_id, None)  # not claimed: nobody there knows what was published of it
                continue
            lease.num_publish_sent = lease.num_published
            lease.num_named_tokens = 0
            self._note_full(lease)
            if not lease.awaits_verdict:
                lease.awaits_verdict = True
                self.num_awaiting_verdict += 1
            claims.append(lease.claim())
        self.to_retain |= {
            op.lease_id: self.leases[op.lease_id] for op in ops if isinstance(op, Retain) and op.lease_id in self.leases
        }
        self._first.append(Reattach((*claims, *self._abandoned.values()), dead_workers))
        again = [op for op in ops if isinstance(op, Acquire | Release | Abandon | Distrust)] + self._settling
        said = {op.lease_id for op in again if isinstance(op, Abandon)}
        self._settling = again + [Abandon(lease_id) for lease_id in self._abandoned if lease_id not in said]

    def answered(self, batch: AnswerBatch) -> tuple[Op, ...]:
        """The ops that a batch answers; none when it answers nothing that is outstanding (another epoch, a double)."""
        if batch.cache_epoch != self.cache_epoch or not self.unanswered:
            return ()
        ops = self.unanswered[0]
        if len(ops) != len(batch.answers):
            return ()
        if not all(_fits(op, answer) for op, answer in zip(ops, batch.answers, strict=True)):
            return ()
        self.unanswered.popleft()
        return ops

    def compare(self, seen: LeaseDigest) -> bool:
        """Whether there is a difference: then the cache service drops, through a fence, whatever is not listed."""
        if self.unanswered or self._first or self.num_awaiting_verdict:
            return False
        if (seen.count, seen.digest) == (self.num_live, self.digest):
            return False
        live = (lease.lease_id for lease in self.leases.values() if lease.state is not LeaseState.ASKED)
        self._first.append(LeaseSet(tuple(live)))
        return True

    # --- what goes out

    @property
    def is_quiet(self) -> bool:
        return not self.leases and not self.unanswered and not self._settling and not self._first

    def settles(self, lease: Lease) -> bool:
        """An op about it waits to go out."""
        return any(op.lease_id == lease.lease_id for op in self._settling)

    def filled(self, lease: Lease, num_computed: int) -> None:
        """Completed steps cover `num_computed` tokens: note full blocks for the next batch."""
        lease.num_full_blocks = max(lease.num_full_blocks, num_computed // lease.block_size)
        self._note_full(lease)

    def _note_full(self, lease: Lease) -> None:
        if lease.num_full_blocks > lease.num_publish_sent and lease.publishable:
            self.to_publish[lease.lease_id] = lease

    def take_publishes(self) -> list[Op]:
        ops: list[Op] = []
        waiting = {}
        for lease_id, lease in self.to_publish.items():
            if lease.awaits_verdict:
                waiting[lease_id] = lease
            elif lease.publishable and lease.num_full_blocks > lease.num_publish_sent:
                ops.append(lease.publication())
                lease.num_publish_sent = lease.num_full_blocks
        self.to_publish = waiting
        return ops

    def take_retentions(self) -> list[Op]:
        """Of prompts that are findable once the publications said so far were executed: they go right after these."""
        ops: list[Op] = []
        for lease_id, lease in list(self.to_retain.items()):
            end = lease.retain_tokens // lease.block_size * lease.block_size
            if lease.state is not LeaseState.LIVE or not lease.publishable:
                del self.to_retain[lease_id]
            elif not lease.awaits_verdict and lease.num_publish_sent * lease.block_size >= end:
                del self.to_retain[lease_id]
                ops.append(Retain(lease_id, 0, end, self._retain_priority, lease.retain_ms))
        return ops

    def take_settling(self) -> list[Op]:
        ops, self._settling = self._settling, []
        return ops

    def take_messages(self, ops: list[Op]) -> tuple[FromClient, ...]:
        messages, self._first = self._first, []
        for batch in _batches(ops):
            self.unanswered.append(batch)
            messages.append(OpBatch(batch))
        return tuple(messages)

    def extend(self, lease: Lease, reserve_tokens: int) -> Op:
        lease.extend_asked = reserve_tokens
        return Extend(lease.lease_id, reserve_tokens)


def _batches(ops: list[Op]) -> Iterator[tuple[Op, ...]]:
    batch: list[Op] = []
    num_bytes = 0
    for op in ops:
        more = len(op.tokens) if isinstance(op, Acquire | Publish) else 0
        if batch and (len(batch) == OPS_PER_BATCH_MAX or num_bytes + more > OPS_BYTES_MAX):
            yield tuple(batch)
            batch, num_bytes = [], 0
        batch.append(op)
        num_bytes += more
    if batch:
        yield tuple(batch)
