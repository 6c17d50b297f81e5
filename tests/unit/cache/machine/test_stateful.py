"""Random ops against a plain model: a dict from prefixes to the handle of their last block.

Dead leases and stale handles are kept on purpose, and used. After every rule the core checks itself, and the model
checks the core: what was evicted is exactly what is not found any more, no shared handle holds other tokens than asked
for, no block has two writers, no generation comes twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import pack, unpack
from typing import TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coppice.ids import DomainId, LeaseId, SchedulerEpoch
from coppice.messages.index import (
    Abandon,
    Acquire,
    Candidate,
    Extend,
    Extended,
    Gone,
    Grant,
    LeaseSet,
    NoCapacity,
    Publish,
    Published,
    Release,
    Released,
)
from coppice.messages.registration import FenceAck
from coppice.seals import NO_SEAL, chain_key, chain_seals
from coppice_cache.core.base.settings import DomainConfig, Mode
from tests.unit.cache import world as cache_world
from tests.unit.cache.world import KEY, MS, NAMESPACE, W, World, lease_id, registration

BLOCK = 2
POOL = 12
DOMAINS = [DomainId("lends"), DomainId("capped"), DomainId("strict")]
CONFIG = cache_world.settings(
    DomainConfig(DOMAINS[0], guarantee_share=0.25),
    DomainConfig(DOMAINS[1], maximum_share=0.5, zero_on_change=True),
    DomainConfig(DOMAINS[2], mode=Mode.STRICT, guarantee_share=0.34),
)
Words = tuple[int, ...]
Choice = TypeVar("Choice")


@dataclass
class ModelLease:
    domain: DomainId
    words: Words
    op: Acquire
    grant: Grant
    handles: list[int]
    settled: int
    session: SchedulerEpoch
    published: list[tuple[Publish, Published]] = field(default_factory=list)


def words(data: bytes) -> Words:
    return unpack(f"<{len(data) // 4}I", data)


def handles(data: bytes) -> list[int]:
    return list(unpack(f"<{len(data) // 8}Q", data))


def packed(data: Words) -> bytes:
    return pack(f"<{len(data)}I", *data)


def one_of(choices: Sequence[Choice], which: int) -> Choice:
    return choices[which % len(choices)]


WHICH = st.integers(0, 1 << 16)
some_words = st.lists(st.integers(0, 1), min_size=1, max_size=11).map(tuple)


class CacheMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.world = World(CONFIG, num_blocks=POOL, block_size=BLOCK)
        self.core = self.world.core
        self.sessions = [self.world.session]
        self.live: dict[LeaseId, ModelLease] = {}
        self.drained: dict[LeaseId, ModelLease] = {}
        self.dead: list[ModelLease] = []
        self.found: dict[tuple[DomainId, Words], int] = {}
        self.seen: set[int] = set()
        self.evicted = 0
        self.count = 0
        self.happened: Counter[str] = Counter()

    # helpers

    def do(self, op: object, session: SchedulerEpoch) -> object:
        return self.world.do(op, session)

    def pick(self, which: int) -> ModelLease:
        return one_of(sorted(self.live.values(), key=lambda x: x.op.lease_id), which)

    def fingerprint(self) -> object:
        worker = self.core.state.workers[W]
        dumps = tuple(self.core.tree(d, max_depth=99, limit=999) for d in DOMAINS)
        return bytes(worker.ledger.state), bytes(worker.ledger.generation), dumps, sorted(worker.leases)

    def fresh(self, owned: bytes) -> list[int]:
        """New handles: never granted before, and above every earlier generation of their block."""
        new = handles(owned)
        for handle in new:
            assert all(handle > old for old in self.seen if (old ^ handle) & 0xFFFFFF == 0)
        self.seen.update(new)
        return new

    def longest(self, domain: DomainId, data: Words) -> int:
        blocks = 0
        while blocks < (len(data) - 1) // BLOCK and (domain, data[: (blocks + 1) * BLOCK]) in self.found:
            blocks += 1
        return blocks

    def learn_evictions(self) -> None:
        """What was evicted leaves the model: exactly as many as were counted, none pinned, none with a descendant."""
        gone = [
            key
            for key in self.found
            if self.core.match(key[0], NAMESPACE, packed((*key[1], 9)), W).num_cached_tokens < len(key[1])
        ]
        evicted = self.core.stats().evicted_blocks
        self.happened["evicted"] += evicted > self.evicted
        assert len(gone) == evicted - self.evicted, (gone, evicted, self.evicted)
        self.evicted = evicted
        for lease in [*self.live.values(), *self.drained.values()]:
            for blocks in range(1, lease.settled + 1):
                assert (lease.domain, lease.words[: blocks * BLOCK]) not in gone
        for key in gone:
            del self.found[key]

    # rules

    @rule(domain=st.sampled_from(DOMAINS), data=some_words, more=st.integers(0, 6), which=WHICH)
    def acquire(self, domain: DomainId, data: Words, more: int, which: int) -> None:
        self.count += 1
        session = self.sessions[which % len(self.sessions)]
        number = lease_id(self.count)
        op = Acquire(number, domain, NAMESPACE, packed(data), len(data) + more, (Candidate(W, 0),))
        expected = self.longest(domain, data)
        before = self.fingerprint()
        answer = self.do(op, session)
        if isinstance(answer, NoCapacity):
            self.happened[answer.reason.value] += 1
            assert answer.retry_after_ms > 0
            assert self.fingerprint() == before
            return
        assert isinstance(answer, Grant)
        assert answer.num_cached_tokens == expected * BLOCK
        shared = handles(answer.shared)
        assert shared == [self.found[domain, data[: (i + 1) * BLOCK]] for i in range(expected)]
        self.happened["shared"] += expected > 0
        seals = chain_seals(chain_key(KEY, domain, NAMESPACE), NO_SEAL, packed(data[: expected * BLOCK]), BLOCK * 4)
        assert answer.shared_seals == seals
        total = -(-(len(data) + more) // BLOCK)
        owned = self.fresh(answer.owned)
        assert len(owned) == total - expected
        self.live[number] = ModelLease(domain, data, op, answer, shared + owned, expected, session)
        self.learn_evictions()

    @precondition(lambda self: self.live)
    @rule(which=WHICH, blocks=st.integers(1, 4), fill=some_words)
    def publish(self, which: int, blocks: int, fill: Words) -> None:
        lease = self.pick(which)
        room = len(lease.handles) - lease.settled
        if not room:
            return
        blocks = min(blocks, room)
        end = (lease.settled + blocks) * BLOCK
        lease.words = lease.words + (fill * end)[: max(0, end - len(lease.words))]
        op = Publish(lease.op.lease_id, lease.settled, packed(lease.words[lease.settled * BLOCK : end]))
        answer = self.do(op, lease.session)
        assert isinstance(answer, Published)
        new = []
        for index in range(lease.settled, lease.settled + blocks):
            key = (lease.domain, lease.words[: (index + 1) * BLOCK])
            if key not in self.found:
                self.found[key] = lease.handles[index]
                new.append(lease.handles[index])
            else:
                self.happened["duplicate"] += 1
        lease.settled += blocks
        assert (answer.num_published_blocks, handles(answer.handles)) == (lease.settled, new)
        lease.published.append((op, answer))
        self.learn_evictions()

    @precondition(lambda self: any(lease.published for lease in self.live.values()))
    @rule(which=WHICH)
    def publish_again(self, which: int) -> None:
        lease = one_of([lease for lease in self.live.values() if lease.published], which)
        op, first = one_of(lease.published, which)
        before = self.fingerprint()
        again = self.do(op, lease.session)
        assert isinstance(again, Published)
        assert (again.handles, again.seals) == (first.handles, first.seals)
        assert self.fingerprint() == before

    @precondition(lambda self: self.live)
    @rule(which=WHICH, more=st.integers(1, 5))
    def extend(self, which: int, more: int) -> None:
        lease = self.pick(which)
        op = Extend(lease.op.lease_id, len(lease.handles) * BLOCK + more)
        before = self.fingerprint()
        answer = self.do(op, lease.session)
        if isinstance(answer, NoCapacity):
            assert self.fingerprint() == before
            return
        assert isinstance(answer, Extended)
        assert answer.first_block == len(lease.handles)
        lease.handles += self.fresh(answer.owned)
        assert len(lease.handles) == -(-op.reserve_tokens // BLOCK)
        self.learn_evictions()
        after = self.fingerprint()
        assert self.do(op, lease.session) == answer
        assert self.fingerprint() == after

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def acquire_again(self, which: int) -> None:
        lease = self.pick(which)
        before = self.fingerprint()
        assert self.do(lease.op, lease.session) == lease.grant
        assert self.fingerprint() == before

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def release(self, which: int) -> None:
        lease = self.pick(which)
        assert self.do(Release(lease.op.lease_id), lease.session) == Released(lease.op.lease_id)
        self.dead.append(self.live.pop(lease.op.lease_id))

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def abandon(self, which: int) -> None:
        lease = self.pick(which)
        self.do(Abandon(lease.op.lease_id), lease.session)
        self.drained[lease.op.lease_id] = self.live.pop(lease.op.lease_id)
        assert self.do(lease.op, lease.session) == Gone(lease.op.lease_id)

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def drop_unlisted(self, which: int) -> None:
        lease = self.pick(which)
        kept = [i for i, other in self.live.items() if other.session == lease.session and other is not lease]
        self.core.receive_client(lease.session, LeaseSet(tuple(kept)), self.world.now_ns)
        self.world.collect()
        self.drained[lease.op.lease_id] = self.live.pop(lease.op.lease_id)

    @precondition(lambda self: self.dead or self.drained)
    @rule(which=WHICH)
    def use_a_dead_lease(self, which: int) -> None:
        lease = one_of([*self.dead, *self.drained.values()], which)
        number = lease.op.lease_id
        before = self.fingerprint()
        assert self.do(Extend(number, 26), lease.session) == Gone(number)
        assert self.do(Publish(number, 0, packed((0, 0))), lease.session) == Gone(number)
        assert self.do(Release(number), lease.session) == Released(number)
        assert self.do(Abandon(number), lease.session) == Released(number)
        assert self.fingerprint() == before

    @precondition(lambda self: self.live and len(self.sessions) > 1)
    @rule(which=WHICH)
    def use_a_foreign_lease(self, which: int) -> None:
        lease = self.pick(which)
        other = next(session for session in self.sessions if session != lease.session)
        before = self.fingerprint()
        assert self.do(Extend(lease.op.lease_id, 26), other) == Gone(lease.op.lease_id)
        assert self.do(Release(lease.op.lease_id), other) == Released(lease.op.lease_id)
        assert self.fingerprint() == before

    @rule()
    def attach(self) -> None:
        if len(self.sessions) < 3:
            self.sessions.append(self.world.attach())

    @rule(which=WHICH)
    def end_session(self, which: int) -> None:
        if len(self.sessions) < 2:
            return
        session = self.sessions.pop(which % len(self.sessions))
        self.core.end_client(session, self.world.now_ns)
        self.world.collect()
        for number in [number for number, lease in self.live.items() if lease.session == session]:
            self.drained[number] = self.live.pop(number)

    @rule(which=WHICH)
    def acknowledge(self, which: int) -> None:
        """Any fence ever sent: again, out of order, of a dead worker epoch."""
        if not (fences := self.world.fences()):
            return
        fence = one_of(fences, which)
        named = {
            number
            for number, lease in self.drained.items()
            if number in fence.lease_ids or lease.session in fence.scheduler_epochs
        }
        worker = self.core.state.workers[W]
        pending = fence.fence_id in worker.fences and fence.worker_epoch == worker.epoch
        before = self.fingerprint()
        self.core.receive_worker(W, FenceAck(fence.fence_id, fence.worker_epoch), self.world.now_ns)
        self.world.collect()
        if not pending:
            assert self.fingerprint() == before
            return
        for number in named:
            if all(lease.lease_id != number for lease in worker.leases.values()):
                self.happened["fenced"] += 1
                self.dead.append(self.drained.pop(number))

    @rule()
    def replace_worker(self) -> None:
        self.world.register(registration(num_blocks=POOL, block_size=BLOCK, highest=1))
        self.dead += [*self.live.values(), *self.drained.values()]
        self.live, self.drained, self.found = {}, {}, {}
        self.seen = set()  # generations are compared within a worker epoch; a new pool starts over
        self.evicted = self.core.stats().evicted_blocks

    @rule()
    def reconnect_worker(self) -> None:
        worker = self.core.state.workers[W]
        before = self.fingerprint()
        same = registration(
            num_blocks=POOL,
            block_size=BLOCK,
            epoch=worker.epoch,
            highest=1,
            generations=worker.ledger.generation.tobytes(),
            seals=bytes(worker.ledger.seals),
        )
        assert self.world.register(same).worker_epoch == worker.epoch
        assert self.fingerprint() == before

    @rule()
    def wait(self) -> None:
        self.world.now_ns += 400 * MS
        self.world.tick(0, alive=tuple(self.sessions))

    @invariant()
    def one_writer_and_what_is_published_is_found(self) -> None:
        writable: set[int] = set()
        for lease in [*self.live.values(), *self.drained.values()]:
            own = set(lease.handles[lease.settled :])
            assert not own & writable
            writable |= own
        assert not writable & set(self.found.values())
        for (domain, prefix), _ in self.found.items():
            match = self.core.match(domain, NAMESPACE, packed((*prefix, 9)), W)
            assert match.num_cached_tokens == len(prefix)


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase
