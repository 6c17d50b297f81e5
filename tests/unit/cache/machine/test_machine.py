"""Everything that the core can be told, in any order, against the plain model of `cache_model`.

Dead leases, old fences, finished copies and stale handles are kept on purpose, and used. Two workers, one with a host
tier; private, capped, strict and disabled domains; several sessions. After every rule the core checks itself, the
model compares what is findable, and followers of the events, with and without a snapshot, are compared with it too.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from msgspec.structs import replace

from coppice.ids import DomainId, LeaseId, SchedulerEpoch
from coppice.messages.index import (
    Abandon,
    Acquire,
    AnswerBatch,
    Distrust,
    Distrusted,
    Extend,
    Gone,
    LeaseSet,
    MatchHints,
    MatchQueries,
    MatchQuery,
    OpBatch,
    Publish,
    Release,
    Released,
)
from coppice.messages.registration import CopiesDone, FenceAck
from coppice.messages.reuse import Reuse
from coppice_cache.core.base.events import Tier
from coppice_cache.core.base.results import ToClientEffect
from tests.unit.cache.follower import Follower
from tests.unit.cache.player import play
from tests.unit.cache.stand import (
    BLOCK,
    CAPPED,
    DOMAINS,
    LENDS,
    POOLS,
    SPACES,
    CacheStand,
    fingerprint,
    one_of,
    other_words,
    prompt,
)
from tests.unit.cache.world import MS, lease_id

WORDS = st.builds(prompt, st.integers(1, 13), st.sampled_from([1, 3, 4, 5, 7, 8, 99, 99, 99]), st.integers(0, 1))
WHICH = st.integers(0, 1 << 12)


class CacheMachine(CacheStand, RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.start()

    # ops

    @rule(domain=st.sampled_from(DOMAINS), space=st.integers(0, 9), data=WORDS, more=st.integers(0, 5), which=WHICH)
    def acquire(self, domain: DomainId, space: int, data: bytes, more: int, which: int) -> None:
        self.count += 1
        flags = {"may_wait": which & 1 == 1, "wants_copy": which & 2 == 2, "skip_match": which % 9 == 8}
        name = SPACES[space == 9]
        cands = self.candidates(which)
        said = {"reuse": tuple(Reuse)[which % 3], "call_kind": which % 17}
        op = Acquire(lease_id(self.count), domain, name, data, len(data) // 4 + more, cands, **said, **flags)
        self.acquired(op, one_of(self.sessions, which))

    @rule(domain=st.sampled_from((LENDS, *DOMAINS)), data=WORDS, which=WHICH)
    def fill(self, domain: DomainId, data: bytes, which: int) -> None:
        """What a short request leaves behind."""
        self.count += 1
        wait = which & 1 == 1
        op = Acquire(
            lease_id(self.count), domain, SPACES[0], data, len(data) // 4, self.candidates(which), may_wait=wait
        )
        self.acquired(op, self.sessions[0])
        lease = self.model.live.get((self.sessions[0], op.lease_id))
        if lease is not None:
            size = self.model.block_bytes
            if len(data) // size > lease.settled:
                self.do(Publish(op.lease_id, 0, data[: len(data) // size * size]), lease.epoch)
            self.do(Release(op.lease_id), lease.epoch)

    @precondition(lambda self: self.model.waiting)
    @rule(which=WHICH)
    def ask_again(self, which: int) -> None:
        (session, _), (_, op, _) = one_of(list(self.model.waiting.items()), which)
        self.acquired(op if which % 3 else replace(op, may_wait=False), session)

    @precondition(lambda self: self.model.live)
    @rule(which=WHICH, blocks=st.integers(1, 4), back=st.integers(0, 3), fill=WORDS)
    def publish(self, which: int, blocks: int, back: int, fill: bytes) -> None:
        lease = self.live(which)
        end = min(lease.settled + blocks, len(lease.handles))
        first = max(0, lease.settled - (back if which % 2 else 0))
        if end > first:
            size = self.model.block_bytes
            tokens, named, acquired = lease.tokens, 0, lease.op.tokens
            if which & 4 and acquired.startswith(lease.tokens[: min(lease.settled * size, len(acquired))]):
                tokens = max(acquired, tokens, key=len)
                named = max(0, min(end, len(acquired) // size) - first)
                self.model.happened["counted, not said"] += named > 0
            tokens += (fill * end * BLOCK)[: max(0, end * size - len(tokens))]
            self.do(Publish(lease.op.lease_id, first, tokens[(first + named) * size : end * size], named), lease.epoch)

    @precondition(lambda self: self.model.live)
    @rule(which=WHICH, more=st.integers(1, 5))
    def extend(self, which: int, more: int) -> None:
        lease = self.live(which)
        self.do(Extend(lease.op.lease_id, len(lease.handles) * BLOCK + more), lease.epoch)

    @precondition(lambda self: self.model.live)
    @rule(which=WHICH)
    def end_a_lease(self, which: int) -> None:
        lease = self.live(which)
        self.do(Abandon(lease.op.lease_id) if which % 4 == 3 else Release(lease.op.lease_id), lease.epoch)

    @precondition(lambda self: self.model.live)
    @rule(which=WHICH)
    def say_it_again(self, which: int) -> None:
        lease = self.live(which)
        self.without_effect(lease.op, lease.epoch, lease.grant)
        if lease.extended is not None:
            self.without_effect(lease.extended[0], lease.epoch, lease.extended[1])
        if lease.done and not lease.gone:
            before = fingerprint(self.core)
            self.do(one_of(lease.done, which)[0], lease.epoch)
            assert fingerprint(self.core) == before

    @precondition(lambda self: self.model.dead or self.model.drained)
    @rule(which=WHICH)
    def use_a_dead_lease(self, which: int) -> None:
        lease = one_of([*self.model.dead, *self.model.drained.values()], which)
        number, session = lease.op.lease_id, lease.epoch
        if (session, number) not in self.model.live and (session, number) not in self.model.waiting:
            self.without_effect(Extend(number, 26), session, Gone(number))
            self.without_effect(Publish(number, 0, bytes(8)), session, Gone(number))
            self.without_effect(Distrust(number, lease.grant.shared), session, Distrusted(number))
            self.without_effect(Release(number), session, Released(number))
            self.without_effect(Abandon(number), session, Released(number))

    @precondition(lambda self: self.model.live)
    @rule(which=WHICH)
    def use_a_foreign_lease(self, which: int) -> None:
        lease = self.live(which)
        for session in self.sessions:
            if session != lease.epoch:
                self.without_effect(Extend(lease.op.lease_id, 26), session, Gone(lease.op.lease_id))
                self.without_effect(Release(lease.op.lease_id), session, Released(lease.op.lease_id))

    @precondition(lambda self: self.model.live)
    @rule(which=WHICH)
    def distrust(self, which: int) -> None:
        """A handle of its own path, or any other that ever was: that one is ignored."""
        lease = self.live(which)
        known = [handle for (place, handle) in self.model.content if place == lease.place]
        if known:
            accused = one_of([*known, *lease.handles], which // 3).to_bytes(8, "little")
            self.do(Distrust(lease.op.lease_id, accused), lease.epoch)

    @rule(which=WHICH, data=WORDS)
    def batch(self, which: int, data: bytes) -> None:
        """Several ops in one message; wakes go out at its end."""
        session, ops = one_of(self.sessions, which), []
        mine = [lease.op.lease_id for lease in self.model.live.values() if lease.epoch == session]
        ops += [Release(one_of(mine, which))] if mine else []
        for turn in range(3):
            self.count += 1
            cands = self.candidates(which // 5)
            ops.append(
                Acquire(
                    lease_id(self.count), LENDS, SPACES[0], data, len(data) // 4 + 1, cands, may_wait=turn != which % 3
                )
            )
        ops += [op for (epoch, _), (_, op, _) in self.model.waiting.items() if epoch == session]
        self.world.now_ns += MS
        self.core.receive_client(session, OpBatch(tuple(ops)), self.world.now_ns)
        for effect in self.core.take_effects():
            if isinstance(effect, ToClientEffect) and isinstance(effect.message, AnswerBatch):
                for op, answer in zip(ops, effect.message.answers, strict=True):
                    self.model.said(session, op, answer, self.world.now_ns)
            else:
                self.model.effect(effect, self.world.now_ns)
        self.settle()

    @rule(domain=st.sampled_from(DOMAINS), data=WORDS)
    def query(self, domain: DomainId, data: bytes) -> None:
        before = fingerprint(self.core)
        hints = self.core.match_all(MatchQueries((MatchQuery(domain, SPACES[0], data),)))
        assert isinstance(hints, MatchHints)
        said = dict(zip(hints.hints[0].worker_ids, hints.hints[0].num_cached_tokens, strict=True))
        for worker_id in POOLS:
            longest = self.model.longest((worker_id, Tier.DEVICE), domain, SPACES[0], data)
            assert said.get(worker_id, 0) == BLOCK * longest
        assert fingerprint(self.core) == before

    # operators

    @rule(kind=st.integers(0, 7), domain=st.sampled_from(DOMAINS), space=st.integers(0, 1), data=WORDS)
    def invalidate(self, kind: int, domain: DomainId, space: int, data: bytes) -> None:
        names = [(None, None), (domain, None), (None, SPACES[space]), (domain, SPACES[space])]
        if kind < 4:
            self.core.invalidate(now_ns=self.world.now_ns, domain=names[kind][0], namespace=names[kind][1])
            self.model.invalidated(*names[kind])
        else:
            self.core.invalidate(now_ns=self.world.now_ns, domain=domain, namespace=SPACES[0], tokens=data)
            whole = data[: len(data) // self.model.block_bytes * self.model.block_bytes]
            for place, keys in list(self.model.found.items()):
                if (domain, SPACES[0], whole) in keys:
                    self.model.forget([place], (domain, SPACES[0], whole))
        self.settle()

    @rule(domain=st.sampled_from(DOMAINS), data=WORDS, which=st.integers(0, 2))
    def pin(self, domain: DomainId, data: bytes, which: int) -> None:
        if self.core.unpin(str(which), self.world.now_ns):
            assert not self.core.unpin(str(which), self.world.now_ns)
        else:
            count = self.core.pin(str(which), domain, SPACES[0], data, self.world.now_ns)
            assert self.core.pin(str(which), domain, SPACES[0], data, self.world.now_ns) == count
        self.settle()

    # workers

    @precondition(lambda self: self.model.orders)
    @rule(which=WHICH, failed=st.booleans(), strange=st.booleans())
    def answer_a_copy(self, which: int, failed: bool, strange: bool) -> None:
        """Any order ever, of a dead epoch too: late, doubled, failed; and one that never was."""
        worker_id, epoch, order_id = one_of(self.model.orders, which)
        worker = self.core.state.workers.get(worker_id)
        counts = order_id in self.model.jobs and worker is not None and worker.epoch == epoch
        before = fingerprint(self.core)
        if counts:
            self.model.copied_or_not(order_id, failed=failed)
        ids = (order_id, 99) if strange else (order_id, order_id)
        done = CopiesDone(epoch, () if failed else ids, ids if failed else ())
        self.core.receive_worker(worker_id, done, self.world.now_ns)
        self.settle()
        assert counts or fingerprint(self.core) == before

    @rule(start=st.integers(20, 22))
    def swap(self, start: int) -> None:
        """Idle for a while, copies are made; then something else needs the device."""
        self.make_copies()
        self.fill(CAPPED, other_words(start, 14), 1)

    @rule(start=st.integers(30, 32))
    def sink(self, start: int) -> None:
        """One prompt after the other pushes those before it out, down to the disk; then the first one is asked for."""
        for turn in range(3):
            self.fill(LENDS, other_words(start + 100 * turn, 14), 6)
            self.make_copies()
            self.make_copies()
        self.fill(LENDS, other_words(start, 14), 1)
        self.make_copies()

    @precondition(lambda self: self.model.fences)
    @rule(which=WHICH)
    def acknowledge(self, which: int) -> None:
        worker_id, fence = one_of(self.model.fences, which)
        counts = (worker_id, fence.worker_epoch, fence.fence_id) in self.model.unanswered
        before = fingerprint(self.core)
        self.model.acknowledged(worker_id, fence)
        self.core.receive_worker(worker_id, FenceAck(fence.fence_id, fence.worker_epoch), self.world.now_ns)
        self.settle()
        worker = self.core.state.workers[worker_id]
        assert (counts and worker.epoch == fence.worker_epoch) or fingerprint(self.core) == before

    @rule(which=WHICH)
    def replace_worker(self, which: int) -> None:
        """It is gone, and comes back: with an empty pool, or with the generations that it had."""
        worker_id = one_of(list(POOLS), which)
        if which % 4 == 0:
            self.model.died(worker_id)
            self.core.end_worker(worker_id, self.world.now_ns)
            self.register(worker_id, fresh=which % 8 == 0)
            self.settle()

    @rule(which=WHICH, lost=st.integers(0, 3))
    def restart_worker(self, which: int, lost: int) -> None:
        """Its process ends and another one finds its files, or what is left of them."""
        self.restart(next(iter(POOLS)), [which + 7 * number for number in range(lost)])

    # sessions and time

    @rule(which=WHICH)
    def change_sessions(self, which: int) -> None:
        if len(self.sessions) < 3 and which % 2:
            self.sessions.append(self.core.attach_client(SchedulerEpoch(0), self.world.now_ns))
        elif len(self.sessions) > 1 and which % 4 == 0:
            session = self.sessions.pop(which % len(self.sessions))
            self.model.ended(session)
            self.core.end_client(session, self.world.now_ns)
        self.settle()

    @precondition(lambda self: self.model.live)
    @rule(which=WHICH)
    def drop_unlisted(self, which: int) -> None:
        lease = self.live(which)
        kept = tuple(i for epoch, i in self.model.live if epoch == lease.epoch and i != lease.op.lease_id)
        self.core.receive_client(lease.epoch, LeaseSet((*kept, LeaseId(b"never granted...")[:16])), self.world.now_ns)
        self.model.drained[lease.key] = self.model.live.pop(lease.key)
        self.settle()

    @rule(ms=st.sampled_from([100, 600, 2_500]), silent=st.integers(0, 9))
    def wait(self, ms: int, silent: int) -> None:
        """Heartbeats of everybody, but for one session at times. After 12 s of silence it is over; if it owns a worker
        and another one stands by, after two."""
        quiet = self.sessions[0] if silent == 0 and len(self.sessions) > 1 else None
        for _ in range(1 if quiet is None else 5):
            self.wait_for(ms, [session for session in self.sessions if session != quiet])

    @rule(count=st.integers(1, 4))
    def follow_late(self, count: int) -> None:
        """A follower that starts with a snapshot, taken in slices while other things happen."""
        if self.late is None:
            self.late, self.cursor = Follower(self.core), None
        told, self.cursor = self.core.snapshot_slice(self.cursor, count)
        self.late.apply(told)
        if self.cursor is None:
            assert self.late.findable() == self.model.found, "snapshot and events say something else"
            self.late = None


CacheMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.wide) for n in range(10, 60, 10))])
def test_long_ways_from_seeds(first: int) -> None:
    for seed in range(first, first + 10):
        play(CacheMachine, seed, steps=70)


@pytest.mark.wide
def test_all_that_matters_happens() -> None:
    happened: Counter[str] = Counter()
    for seed in range(200, 220):
        happened += play(CacheMachine, seed, steps=150)
    wanted = {"shared", "pending", "woken", "evicted", "copy source", "distrusted", "fenced", "publication refused"}
    wanted |= {
        "counted, not said",
        "pending again",
        "pool_full",
        "domain_maximum",
        "never_fits",
        "demote",
        "promote",
        "store",
        "load",
        "disk kept",
        "disk cut",
        "session expired",
        "no match wanted",
    }
    assert not wanted - set(happened), f"no test of these: {wanted - set(happened)}"


def test_an_answer_that_is_said_again_orders_no_demotion() -> None:
    """Found by the long run: more was to be copied than may be under way, and any answer had it looked at again."""
    state = CacheMachine()
    state.begin()
    for data in ((8, 1, 0), (10, 1, 0), *[(1, 1, 0)] * 5, (8, 4, 0)):
        state.fill(LENDS, prompt(*data), 0)
    state.fill(DomainId("off"), prompt(11, 1, 0), 0)
    state.fill(LENDS, prompt(1, 1, 0), 0)
    state.answer_a_copy(2113, failed=True, strange=False)
    state.answer_a_copy(4095, failed=False, strange=False)
    state.fill(LENDS, prompt(12, 3, 0), 0)
    state.fill(CAPPED, prompt(9, 1, 0), 0)
    state.answer_a_copy(0, failed=True, strange=False)
    state.answer_a_copy(0, failed=False, strange=False)
    state.teardown()


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_the_machine_for_longer() -> None:
    many = settings(CacheMachine.TestCase.settings, max_examples=3_000, stateful_step_count=80)
    run_state_machine_as_test(CacheMachine, settings=many)


@pytest.mark.long
@pytest.mark.batch
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("first", range(1_000, 4_000, 250))
def test_longer_ways_from_seeds(first: int) -> None:
    for seed in range(first, first + 250):
        play(CacheMachine, seed, steps=200)
