"""A cache service small enough to be read: blocks out of a counter, prefixes in a dict, one ledger per worker.

It answers the ops of `coppice.messages.index` and asserts what a scheduler must keep to: publishes without gaps, of
tokens that were computed, and a release only after the worker has let the sequence go (`still_used`).

Who asks for a prefix that a live lease is about to publish waits for it (`flight_retry_ms` > 0). A domain of `owed`
that finds the pool full below what is owed to it has the others asked for their blocks, which are kept for it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from coppice.handles import block_ids, block_of, generation_of, make_generation, pack_handle
from coppice.ids import BlockId, CacheEpoch, DomainId, LeaseId, WorkerEpoch, WorkerId
from coppice.messages.index import (
    Abandon,
    Acquire,
    Answer,
    AnswerBatch,
    Distrust,
    Distrusted,
    Extend,
    Extended,
    FromClient,
    Gone,
    Grant,
    LeaseClaim,
    LeaseDigest,
    MatchHint,
    MatchHints,
    MatchQueries,
    MatchQuery,
    NoCapacity,
    NoCapacityReason,
    NotPublished,
    NotPublishedReason,
    Op,
    OpBatch,
    Pending,
    Publish,
    Published,
    Reattach,
    Reattached,
    Reclaim,
    Release,
    Released,
    Retain,
    Retained,
    ToClient,
    Wake,
    WorkerInfo,
    Workers,
    lease_hash,
)
from tests.fakes.scheduler.scheduler_ledger import NAMESPACE, Entry, HeldLease, Ledger, packed, said_in_full, seal_of


class FakeIndex:
    def __init__(self, block_size: int, domain_blocks_max: int = 1 << 20, retry_after_ms: int = 20) -> None:
        self.block_size = block_size
        self.domain_blocks_max = domain_blocks_max
        self.retry_after_ms = retry_after_ms
        self.epoch = CacheEpoch(1)
        self.ledgers: dict[WorkerId, Ledger] = {}
        self.max_sequences = 0  # of every worker
        self.flight_retry_ms = 0
        self.waiters: dict[LeaseId, LeaseId] = {}  # who waits, for whom
        self.disabled: set[str] = set()  # domains that leave no trace
        self.owed: dict[str, int] = {}  # blocks that each domain may always hold on a worker
        self.needs: dict[LeaseId, tuple[WorkerId, str, int]] = {}  # refused below what is owed: how many blocks
        self.outbox: list[ToClient] = []  # said without being asked
        self.leases: dict[LeaseId, HeldLease] = {}
        self.still_used: Callable[[LeaseId], bool] = lambda lease_id: False
        self.was_computed: Callable[[Publish, int], bool] = lambda op, block_size: True
        self.fence: Callable[[LeaseId], None] = lambda lease_id: None

    # --- registry

    def register(self, worker_id: WorkerId, epoch: WorkerEpoch, num_blocks: int) -> None:
        """A worker with nothing in it; leases of its older epochs are gone."""
        for lease_id in [key for key, lease in self.leases.items() if lease.worker_id == worker_id]:
            del self.leases[lease_id]
        self.ledgers[worker_id] = Ledger(epoch, num_blocks, free=list(range(num_blocks)))

    def workers(self) -> Workers:
        infos = [
            WorkerInfo(
                name,
                ledger.epoch,
                "here:0",
                ledger.num_blocks,
                self.block_size,
                NAMESPACE,
                "m",
                ledger.open,
                max_sequences=self.max_sequences,
            )
            for name, ledger in sorted(self.ledgers.items())
        ]
        return Workers(self.epoch, tuple(infos))

    def restart(self) -> None:
        """Everything is forgotten but the worker's registration; handles get a higher epoch."""
        self.epoch = CacheEpoch(self.epoch + 1)
        self.leases.clear()
        self.waiters.clear()
        self.needs.clear()
        for ledger in self.ledgers.values():
            ledger.cached.clear()
            ledger.counters.clear()
            ledger.free = list(range(ledger.num_blocks))

    def digest(self) -> LeaseDigest:
        digest = 0
        for lease_id in self.leases:
            digest ^= lease_hash(lease_id)
        return LeaseDigest(len(self.leases), digest)

    # --- messages

    def take(self, message: FromClient) -> ToClient | None:
        if isinstance(message, MatchQueries):
            return MatchHints(self.epoch, tuple(self._hint(query) for query in message.queries))
        if isinstance(message, OpBatch):
            return AnswerBatch(self.epoch, tuple(self.answer(op) for op in message.ops))
        if isinstance(message, Reattach):
            return self._reattach(message)
        unknown = tuple(lease_id for lease_id in message.lease_ids if lease_id not in self.leases)
        for lease_id in set(self.leases) - set(message.lease_ids):
            self.drop(lease_id)
        return Reattached(self.epoch, (), unknown)

    def answer(self, op: Op) -> Answer:
        if isinstance(op, Acquire):
            return self._acquire(op)
        if isinstance(op, Release | Abandon):
            if isinstance(op, Abandon):
                self.fence(op.lease_id)
            assert not self.still_used(op.lease_id), "released before it was removed"
            self.waiters.pop(op.lease_id, None)
            self.needs.pop(op.lease_id, None)
            self._end(op.lease_id)
            return Released(op.lease_id)
        if isinstance(op, Distrust):
            return Distrusted(op.lease_id)
        lease = self.leases.get(op.lease_id)
        if lease is None:
            return Gone(op.lease_id)
        if isinstance(op, Retain):
            return Retained(op.lease_id, 0)
        return self._extend(lease, op) if isinstance(op, Extend) else self._publish(lease, op)

    def _acquire(self, op: Acquire) -> Answer:
        held = self.leases.get(op.lease_id)
        if held is not None and held.grant is not None:
            return held.grant
        self.waiters.pop(op.lease_id, None)
        ledgers = [(c, self.ledgers[c.worker_id]) for c in op.candidates if c.worker_id in self.ledgers]
        ledgers = [(c, ledger) for c, ledger in ledgers if ledger.open]
        if not ledgers:
            return self._no(op.lease_id, NoCapacityReason.NO_WORKER)
        matches = {c.worker_id: self._match(ledger, op) for c, ledger in ledgers}
        candidate, ledger = min(ledgers, key=lambda pair: pair[0].load_cost - self._tokens(matches[pair[0].worker_id]))
        shared = [] if op.skip_match else matches[candidate.worker_id]
        leader = self._leader(op, candidate.worker_id, len(shared))
        if leader is not None:
            self.waiters[op.lease_id] = leader
            return Pending(op.lease_id, self._tokens(shared) + self.block_size, self.flight_retry_ms)
        blocks = -(-op.reserve_tokens // self.block_size)
        if blocks > min(ledger.num_blocks, self.domain_blocks_max):
            return self._no(op.lease_id, NoCapacityReason.NEVER_FITS)
        for entry in shared:
            entry.pins.add(op.lease_id)
        owned = self._take(candidate.worker_id, op.domain, blocks - len(shared), op.lease_id)
        if isinstance(owned, NoCapacityReason):
            for entry in shared:
                entry.pins.discard(op.lease_id)
            return self._no(op.lease_id, owned)
        grant = Grant(
            lease_id=op.lease_id,
            worker_id=candidate.worker_id,
            worker_epoch=ledger.epoch,
            num_cached_tokens=len(shared) * self.block_size,
            shared=packed([entry.handle for entry in shared]),
            shared_seals=b"".join(entry.seal for entry in shared),
            owned=packed(owned),
            zero=packed(owned[:1]),
        )
        covered = op.tokens[: len(shared) * self.block_size * 4]
        self.leases[op.lease_id] = HeldLease(
            op, candidate.worker_id, covered, [e.handle for e in shared], owned, grant, len(shared)
        )
        return grant

    def _leader(self, op: Acquire, worker_id: WorkerId, num_shared: int) -> LeaseId | None:
        """A live lease that is to publish the block after the match."""
        end = (num_shared + 1) * self.block_size * 4
        if (
            not (self.flight_retry_ms and op.may_wait)
            or op.skip_match
            or op.domain in self.disabled
            or end >= len(op.tokens)
        ):
            return None
        for lease_id, lease in self.leases.items():
            mine = lease.worker_id == worker_id and lease.op.domain == op.domain and lease.findable
            same = isinstance(lease.op, Acquire) and lease.op.tokens[:end] == op.tokens[:end]
            if mine and same and lease.published <= num_shared:
                return lease_id
        return None

    def _wake(self, leader: LeaseId) -> None:
        woken = [waiter for waiter, lease_id in self.waiters.items() if lease_id == leader]
        for waiter in woken:
            del self.waiters[waiter]
        if woken:
            self.outbox.append(Wake(self.epoch, tuple(woken)))

    def _owed(self, worker_id: WorkerId, domain: str, lease_id: LeaseId, count: int) -> None:
        """Remember what a domain lacks of what is its own, and ask the others for all that is lacking."""
        if self._held(worker_id, domain) + count > self.owed.get(domain, 0):
            self.needs.pop(lease_id, None)
            return
        self.needs[lease_id] = (worker_id, domain, count)
        for other in sorted({str(lease.op.domain) for lease in self.leases.values() if lease.worker_id == worker_id}):
            over = self._held(worker_id, other) - self.owed.get(other, 0)
            if other != domain and over > 0:
                self.outbox.append(Reclaim(self.epoch, worker_id, DomainId(other), min(over, self.promised(worker_id))))

    def promised(self, worker_id: WorkerId, taker: str = "") -> int:
        return sum(count for name, domain, count in self.needs.values() if name == worker_id and domain != taker)

    def _held(self, worker_id: WorkerId, domain: str) -> int:
        leases = [lease for lease in self.leases.values() if lease.worker_id == worker_id]
        return sum(len(lease.owned) for lease in leases if lease.op.domain == domain)

    def _tokens(self, entries: list[Entry]) -> int:
        return len(entries) * self.block_size

    def _no(self, lease_id: LeaseId, reason: NoCapacityReason) -> NoCapacity:
        return NoCapacity(lease_id, reason, self.retry_after_ms)

    def _hint(self, query: MatchQuery) -> MatchHint:
        found = {name: self._tokens(self._match(ledger, query)) for name, ledger in sorted(self.ledgers.items())}
        found = {name: num_tokens for name, num_tokens in found.items() if num_tokens}
        return MatchHint(tuple(found), tuple(found.values()))

    def _match(self, ledger: Ledger, op: Acquire | MatchQuery) -> list[Entry]:
        entries = []
        step = self.block_size * 4
        for end in range(step, len(op.tokens) - 3, step):
            entry = ledger.cached.get((op.domain, op.tokens[:end]))
            if entry is None:
                break
            entries.append(entry)
        return entries

    def _take(self, worker_id: WorkerId, domain: str, count: int, lease_id: LeaseId) -> list[int] | NoCapacityReason:
        ledger = self.ledgers[worker_id]
        if self._held(worker_id, domain) + count > self.domain_blocks_max:
            return NoCapacityReason.DOMAIN_MAXIMUM
        evictable = [key for key, entry in ledger.cached.items() if not entry.pins]
        evictable.sort(key=lambda key: -len(key[1]))
        entitled = self._held(worker_id, domain) + count <= self.owed.get(domain, 0)
        kept = 0 if entitled else self.promised(worker_id, domain)
        if count and len(ledger.free) + len(evictable) - kept < count:
            self._owed(worker_id, domain, lease_id, count)
            return NoCapacityReason.POOL_FULL
        self.needs.pop(lease_id, None)
        while len(ledger.free) < count:
            ledger.free += block_ids(packed([ledger.cached.pop(evictable.pop(0)).handle])).tolist()
        return [self._grant_block(ledger, ledger.free.pop(0)) for _ in range(count)]

    def _grant_block(self, ledger: Ledger, block: int) -> int:
        ledger.counters[block] = ledger.counters.get(block, 0) + 1
        return pack_handle(BlockId(block), make_generation(self.epoch, ledger.counters[block]))

    def _extend(self, lease: HeldLease, op: Extend) -> Answer:
        if op.reserve_tokens in lease.last_extended:
            return lease.last_extended[op.reserve_tokens]
        first = len(lease.shared) + len(lease.owned)
        blocks = -(-op.reserve_tokens // self.block_size)
        if blocks > min(self.ledgers[lease.worker_id].num_blocks, self.domain_blocks_max):
            return self._no(op.lease_id, NoCapacityReason.NEVER_FITS)
        owned = self._take(lease.worker_id, lease.op.domain, max(0, blocks - first), op.lease_id)
        if isinstance(owned, NoCapacityReason):
            return self._no(op.lease_id, owned)
        lease.owned += owned
        answer = Extended(op.lease_id, first, packed(owned), packed(owned))
        lease.last_extended = {op.reserve_tokens: answer}
        return answer

    def _publish(self, lease: HeldLease, op: Publish) -> Answer:
        if lease.op.domain in self.disabled:
            return NotPublished(op.lease_id, NotPublishedReason.DOMAIN_DISABLED)
        if not lease.findable:
            return NotPublished(op.lease_id, NotPublishedReason.TREE_GONE)
        assert op.first_block <= lease.published, "a gap between published blocks"
        op = said_in_full(op, lease.op.tokens if isinstance(lease.op, Acquire) else b"", self.block_size)
        assert self.was_computed(op, self.block_size), "published before its step completed"
        step = self.block_size * 4
        assert len(op.tokens) % step == 0
        cached = self.ledgers[lease.worker_id].cached
        handles, seals = [], []
        for index in range(len(op.tokens) // step):
            block = op.first_block + index
            if block == lease.published:
                lease.tokens += op.tokens[index * step : (index + 1) * step]
                lease.published += 1
            key = (str(lease.op.domain), lease.tokens[: (block + 1) * step])
            handle = (lease.shared + lease.owned)[block]
            entry = cached.setdefault(key, Entry(handle, seal_of(*key), {op.lease_id}))
            if entry.handle == handle and handle in lease.owned:
                handles.append(handle)
                seals.append(entry.seal)
        if isinstance(lease.op, Acquire) and lease.published >= len(lease.op.tokens) // step:
            self._wake(op.lease_id)
        return Published(op.lease_id, lease.published, packed(handles), b"".join(seals))

    def drop(self, lease_id: LeaseId) -> None:
        """End a lease without its holder's word: through a fence."""
        self.fence(lease_id)
        self._end(lease_id)

    def _end(self, lease_id: LeaseId) -> None:
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            return
        self._wake(lease_id)
        self.needs.pop(lease_id, None)
        ledger = self.ledgers[lease.worker_id]
        cached = {entry.handle for entry in ledger.cached.values()}
        for entry in ledger.cached.values():
            entry.pins.discard(lease_id)
        others = [other for other in self.leases.values() if other.worker_id == lease.worker_id]
        held = {handle for other in others for handle in other.shared + other.owned}
        freed = [handle for handle in lease.owned + lease.shared if handle not in cached and handle not in held]
        ledger.free += [block for block in block_ids(packed(freed)).tolist() if block not in ledger.free]

    # --- reattachment

    def _reattach(self, message: Reattach) -> Reattached:
        accepted, refused = [], []
        claimed = {claim.lease_id for claim in message.claims}
        for lease_id in [key for key in self.leases if key not in claimed]:
            self.drop(lease_id)
        for claim in message.claims:
            ledger = self.ledgers.get(claim.worker_id)
            known = claim.lease_id in self.leases
            if ledger is None or ledger.epoch != claim.worker_epoch:
                refused.append(claim.lease_id)
                continue
            accepted.append(claim.lease_id)
            if not known:
                self._readmit(ledger, claim)
        return Reattached(self.epoch, tuple(accepted), tuple(refused))

    def _readmit(self, ledger: Ledger, claim: LeaseClaim) -> None:
        shared = np.frombuffer(claim.shared, dtype="<u8").tolist()
        owned = np.frombuffer(claim.owned, dtype="<u8").tolist()
        owned = [handle for handle in owned if block_of(handle) in ledger.free]  # others were granted since: theirs
        for block in block_ids(claim.shared + claim.owned).tolist():
            if block in ledger.free:
                ledger.free.remove(block)
        assert all(generation_of(handle) for handle in shared + owned)
        self.leases[claim.lease_id] = HeldLease(claim, claim.worker_id, b"", shared, owned, findable=False)

    def check(self) -> None:
        """Blocks of a worker are free, cached or held by exactly one owner."""
        for worker_id, ledger in self.ledgers.items():
            cached = {entry.handle for entry in ledger.cached.values()}
            owned = [h for lease in self.leases.values() if lease.worker_id == worker_id for h in lease.owned]
            own = [handle for handle in owned if handle not in cached]
            shared = {h for lease in self.leases.values() if lease.worker_id == worker_id for h in lease.shared}
            held = set(own) | cached | shared
            blocks = block_ids(packed(sorted(held))).tolist() + ledger.free
            assert len(set(blocks)) == len(blocks), "a block has two states"
            assert len(blocks) == ledger.num_blocks, f"blocks are lost: {set(range(ledger.num_blocks)) - set(blocks)}"
