"""Random lenders and borrowers: whoever asks for what is its own gets it after one round of reclaim, at most.

The model knows how many blocks each lease holds, and from that who is within its guarantee. Borrowers give back what
they are asked for, late, in part or never; fences are acknowledged at the next tick. Nothing is published here, so
that every block is leased, draining or free; what is cached is the business of `test_cache_stateful`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coppice.ids import DomainId, LeaseId, SchedulerEpoch
from coppice.messages.index import (
    Acquire,
    Candidate,
    Extend,
    Extended,
    Gone,
    Grant,
    NoCapacity,
    NoCapacityReason,
    Reattached,
    Reclaim,
    Release,
)
from coppice_cache.core.base.results import ToClientEffect
from coppice_cache.core.base.settings import DomainConfig, Mode
from tests.unit.cache import world as cache_world
from tests.unit.cache.world import MS, NAMESPACE, W, World, lease_id, tokens

POOL = 14
GRACE_MS = 400
TICK_MS = 50
FIRST, SECOND, FIXED, NOTHING = (DomainId(name) for name in ("first", "second", "fixed", "nothing"))
GUARANTEES = {FIRST: 5, SECOND: 3, NOTHING: 0, FIXED: 3}
DOMAINS = sorted(GUARANTEES)
ROUND_TICKS = GRACE_MS // TICK_MS + 3  # the grace period, the fence that follows it, and a tick to ask again
CONFIG = cache_world.settings(
    *(
        DomainConfig(domain, Mode.STRICT if domain == FIXED else Mode.PRIVATE, guarantee_blocks=blocks)
        for domain, blocks in GUARANTEES.items()
    ),
    session_ttl_ms=600_000,
    worker_ttl_ms=600_000,
    heartbeat_ms=300_000,
    reclaim_grace_ms=GRACE_MS,
)
WHICH = st.integers(0, 1 << 16)


@dataclass
class Held:
    """A lease that lives, or drains."""

    lease_id: LeaseId
    domain: DomainId
    session: SchedulerEpoch
    blocks: int
    drains: bool = False


@dataclass
class Wish:
    """An op that was refused, and is repeated at every tick."""

    op: Acquire | Extend
    domain: DomainId
    session: SchedulerEpoch
    blocks: int


class GuaranteeMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.world = World(CONFIG, num_blocks=POOL, block_size=1)
        self.core = self.world.core
        self.sessions = [self.world.session, self.world.attach()]
        self.held: dict[LeaseId, Held] = {}
        self.wishes: dict[LeaseId, Wish] = {}
        self.asked: dict[tuple[SchedulerEpoch, DomainId], int] = {}
        self.count = 0
        self.seen = 0
        self.happened: Counter[str] = Counter()
        for blocks in (4, 2, 3, 2):  # all that may be borrowed is, and more is wanted
            self.want(NOTHING, blocks, which=blocks)
        self.want(NOTHING, 2, which=0)

    # the model

    def blocks_of(self, domain: DomainId) -> int:
        return sum(held.blocks for held in self.held.values() if held.domain == domain)

    def is_owed(self, wish: Wish) -> bool:
        return wish.domain != FIXED and self.blocks_of(wish.domain) + wish.blocks <= GUARANTEES[wish.domain]

    def hear(self) -> None:
        """What the core said since: reclaims, and leases that are lost."""
        log, self.seen = self.world.log[self.seen :], len(self.world.log)
        for effect in log:
            if not isinstance(effect, ToClientEffect):
                continue
            message = effect.message
            if isinstance(message, Reclaim):
                over = self.blocks_of(message.domain) - GUARANTEES[message.domain]
                assert message.domain != FIXED
                assert 0 < message.num_blocks <= over, "a guarantee is asked for"
                self.asked[effect.epoch, message.domain] = message.num_blocks
                self.happened["reclaim"] += 1
            elif isinstance(message, Reattached):
                for lost in message.refused:
                    held = self.held[lost]
                    assert self.blocks_of(held.domain) > GUARANTEES[held.domain], "a guarantee is fenced"
                    held.drains = True
                    self.wishes.pop(lost, None)
                    self.happened["fenced"] += 1

    def ask(self, wish: Wish) -> bool:
        """Do the op; True when it was granted. Who was refused asks again."""
        answer = self.world.do(wish.op, wish.session)
        self.hear()
        number = wish.op.lease_id
        if isinstance(answer, Grant):
            self.held[number] = Held(number, wish.domain, wish.session, wish.blocks)
            return True
        if isinstance(answer, Extended):
            self.held[number].blocks += wish.blocks
            return True
        if isinstance(answer, Gone) or answer.reason is NoCapacityReason.NEVER_FITS:  # type: ignore[union-attr]
            self.wishes.pop(number, None)
            return False
        assert isinstance(answer, NoCapacity)
        assert wish.domain != FIXED or answer.reason is NoCapacityReason.DOMAIN_MAXIMUM, "others' needs concern it"
        self.wishes[number] = wish
        return False

    # rules

    @rule(domain=st.sampled_from(DOMAINS), blocks=st.integers(1, 6), which=WHICH)
    def acquire(self, domain: DomainId, blocks: int, which: int) -> None:
        self.want(domain, blocks, which)

    def want(self, domain: DomainId, blocks: int, which: int) -> Wish:
        self.count += 1
        number = lease_id(self.count)
        session = self.sessions[which % len(self.sessions)]
        prompt = tokens(1, 10_000 + self.count)
        op = Acquire(number, domain, NAMESPACE, prompt, blocks, (Candidate(W, 0),))
        wish = Wish(op, domain, session, blocks)
        self.ask(wish)
        return wish

    def live(self) -> list[Held]:
        return [held for held in self.held.values() if not held.drains]

    @precondition(lambda self: self.live())
    @rule(which=WHICH, more=st.integers(1, 2))
    def extend(self, which: int, more: int) -> None:
        held = self.live()[which % len(self.live())]
        if held.lease_id not in self.wishes:
            self.ask(Wish(Extend(held.lease_id, held.blocks + more), held.domain, held.session, more))

    @precondition(lambda self: self.live())
    @rule(which=WHICH)
    def release(self, which: int) -> None:
        self.end(self.live()[which % len(self.live())])

    def end(self, held: Held) -> None:
        self.world.do(Release(held.lease_id), held.session)
        self.wishes.pop(held.lease_id, None)
        del self.held[held.lease_id]
        self.hear()
        for wish in [wish for wish in self.wishes.values() if not self.is_owed(wish)]:
            self.repeat(wish)  # who borrows is always first to ask for what came free

    def repeat(self, wish: Wish) -> None:
        is_owed = self.is_owed(wish)
        if self.ask(wish):
            self.happened["met"] += is_owed
            del self.wishes[wish.op.lease_id]

    @precondition(lambda self: self.asked)
    @rule(which=WHICH, part=st.sampled_from((1, 2)))
    def give_back(self, which: int, part: int) -> None:
        """What was asked for, or half of it; latest first, as schedulers do."""
        key = sorted(self.asked)[which % len(self.asked)]
        count = self.asked.pop(key) // part
        for held in reversed(self.live()):
            if count > 0 and (held.session, held.domain) == key:
                count -= held.blocks
                self.end(held)
                self.happened["gave back"] += 1

    @precondition(lambda self: self.wishes)
    @rule(which=WHICH)
    def give_up(self, which: int) -> None:
        number = sorted(self.wishes)[which % len(self.wishes)]
        wish = self.wishes.pop(number)
        if isinstance(wish.op, Acquire):
            self.world.do(Release(number), wish.session)
            self.hear()

    @rule(domain=st.sampled_from((FIRST, SECOND)), blocks=st.integers(1, 5), seed=st.integers(0, 1 << 32))
    def insist(self, domain: DomainId, blocks: int, seed: int) -> None:
        """Ask for what is one's own until it is there, whatever the others do meanwhile."""
        wish = self.want(domain, blocks, which=seed)
        random = Random(seed)
        for _ in range(ROUND_TICKS):
            if wish.op.lease_id not in self.wishes or not self.is_owed(wish):
                return
            for _ in range(random.randrange(3)):
                self.meddle(random, wish)
            self.wait(1)
        assert wish.op.lease_id not in self.wishes or not self.is_owed(wish), (
            f"{domain} waits for {blocks} for too long"
        )

    def meddle(self, random: Random, waiting: Wish) -> None:
        """Somebody else takes, or gives back some of what it was asked for."""
        if self.asked and random.random() < 0.4:
            self.give_back(which=random.randrange(8), part=random.choice((1, 2)))
            return
        domain = random.choice([domain for domain in DOMAINS if domain != waiting.domain])
        self.want(domain, random.randrange(1, 4), which=random.randrange(8))

    @rule(ticks=st.integers(1, 3))
    def wait(self, ticks: int) -> None:
        """Time passes: fences are acknowledged, and everybody asks again, those who borrow first."""
        for _ in range(ticks):
            self.world.now_ns += TICK_MS * MS
            for session in self.sessions:  # who owns the worker and is silent loses it to the other
                self.core.heard_client(session, self.world.now_ns)
            self.core.tick(self.world.now_ns)
            self.world.collect()
            self.hear()
            for pending in tuple(self.core.state.workers[W].fences.values()):
                self.world.ack(pending.message)
                named = set(pending.message.lease_ids)
                self.held = {number: held for number, held in self.held.items() if number not in named}
            for wish in sorted(self.wishes.values(), key=self.is_owed):
                if wish.op.lease_id in self.wishes:
                    self.repeat(wish)

    @invariant()
    def the_accounts_agree(self) -> None:
        for account in self.core.state.workers[W].quotas.accounts.values():
            assert account.held == self.blocks_of(account.config.domain)
        assert sum(held.blocks for held in self.held.values()) <= POOL


GuaranteeMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestGuaranteeMachine = GuaranteeMachine.TestCase
