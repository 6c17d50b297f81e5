"""The world of the cache machine: pools, domains, and how one thing is done and everything compared afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from msgspec.structs import replace

from coppice.ids import DomainId, Namespace, SchedulerEpoch, WorkerEpoch, WorkerId
from coppice.messages.index import (
    Acquire,
    Answer,
    Candidate,
    Grant,
    Op,
    Pending,
    Release,
)
from coppice.messages.registration import CopiesDone, FenceAck, Register, Registered
from coppice_cache.core.base.events import IndexEvent, Tier
from coppice_cache.core.base.results import Regrown, ToWorkerEffect
from coppice_cache.core.base.settings import DomainConfig, Mode, TierCosts
from coppice_cache.core.index import IndexCore
from coppice_cache.core.inspection.snapshots import Cursor
from coppice_cache.edge.events.kv_events_view import KvEventsView
from tests.unit.cache import world as cache_world
from tests.unit.cache.books import ModelLease, common, findable
from tests.unit.cache.follower import Follower
from tests.unit.cache.model import Model
from tests.unit.cache.name_reader import NameReader
from tests.unit.cache.world import MS, registration

BLOCK = 2
LENDS, CAPPED, STRICT, OFF = DomainId("lends"), DomainId("capped"), DomainId("strict"), DomainId("off")
DOMAINS = (LENDS, CAPPED, STRICT, OFF)
SPACES = (Namespace(b"model-a"), Namespace(b"model-b"))
POOLS = {WorkerId("w"): (20, 12, 24), WorkerId("v"): (12, 0, 0)}  # blocks of the device, of the host, on the disk
CHEAP = TierCosts(prefill_us_per_token=100.0, copy_us_per_block=1.0, order_us=10.0)
CONFIG = cache_world.settings(
    DomainConfig(LENDS, guarantee_share=0.3),
    DomainConfig(CAPPED, maximum_share=0.6, zero_on_change=True),
    DomainConfig(STRICT, mode=Mode.STRICT, guarantee_share=0.3),
    DomainConfig(OFF, mode=Mode.DISABLED),
    tiers=CHEAP,
    disk_costs=CHEAP,
    disk_rest_ms=200,
    demote_below_share=0.5,
    flight_tokens_min=2,
    record_events=True,
)
Choice = TypeVar("Choice")


def prompt(length: int, differs_at: int, tail: int) -> bytes:
    """Prompts that share beginnings: all go the same way, but for one token, after which a few ways are open."""
    words = [(7 * position) % 3 for position in range(length)]
    if differs_at < length:
        words[differs_at:] = [5 + tail + position % 2 for position in range(length - differs_at)]
    return b"".join(word.to_bytes(4, "little") for word in words)


def other_words(start: int, count: int) -> bytes:
    return b"".join((start + word).to_bytes(4, "little") for word in range(count))


def one_of(choices: Sequence[Choice], which: int) -> Choice:
    return choices[which % len(choices)]


def fingerprint(core: IndexCore) -> object:
    """All that answers can depend on."""
    state = core.state
    pools = []
    for worker in state.workers.values():
        for store in worker.stores:
            ledger = store.ledger
            accounts = [
                (account.config.domain, account.held, account.protected, account.leases)
                for account in store.quotas.accounts.values()
            ]
            pools.append(
                (bytes(ledger.state), ledger.generation.tobytes(), bytes(ledger.seals), list(ledger.free), accounts)
            )
        pools.append((sorted(worker.leases), sorted(worker.fences), worker.flights.num_waiting, len(worker.flights)))
        pools.append([sorted(tier.jobs) for tier in worker.lower_tiers])
    sessions = [(s.epoch, sorted(s.leases), sorted(s.draining), sorted(s.waiting)) for s in state.sessions.values()]
    return pools, sessions, core.pins(), findable(core)


class CacheStand:
    def start(self) -> None:
        self.world = cache_world.World(CONFIG)
        self.core = self.world.core
        self.told: dict[WorkerId, WorkerEpoch] = {}  # what each worker was registered as last
        self.keeps_disk: dict[WorkerId, bool] = {}  # and whether what is on its disk belongs to that epoch
        self.model = Model(self.core, BLOCK)
        self.follower, self.late = Follower(self.core), None
        self.cursor: Cursor | None = None
        self.view = KvEventsView(frozenset({*DOMAINS, LENDS}), "{worker}", with_tokens=False)
        self.reader = NameReader()
        for worker_id in POOLS:
            self.register(worker_id, fresh=True)
        self.sessions = [self.core.attach_client(SchedulerEpoch(0), self.world.now_ns) for _ in range(2)]
        self.count = 0
        self.pinned = 0
        self.settle()

    # helpers

    def settle(self) -> None:
        """Take the effects of what was just done, and compare everything."""
        regrown = False
        for effect in self.core.take_effects():
            regrown |= isinstance(effect, Regrown)
            if isinstance(effect, ToWorkerEffect) and isinstance(effect.message, Registered):
                self._registered(effect.worker_id, effect.message)
            self.model.effect(effect, self.world.now_ns)
        self.core.check()
        self.world.meter.compare(later_ns=7)
        self.model.learn(findable(self.core))
        events = self.core.take_events()
        if regrown:
            events = self._start_over()
        self.follower.apply(events)
        assert self.follower.findable() == self.model.found
        if self.late is not None:
            self.late.apply(events)
        for event in events:
            for told in self.view.tell(event):
                self.reader.hear(told.topic, told.event)
        assert self.follower.names() <= self.reader.has(), "a router is told that what is there is gone"

    def _start_over(self) -> list[IndexEvent]:
        """Followers and routers get a snapshot, as trees regrew."""
        self.follower, self.late, self.cursor = Follower(self.core), None, None
        self.view.forget()
        self.reader = NameReader()
        told, cursor = self.core.snapshot_slice(None, 1 << 20)
        assert cursor is None
        return list(told)

    def do(self, op: Op, session: SchedulerEpoch) -> Answer:
        self.world.now_ns += MS
        answer = self.core.execute(session, op, self.world.now_ns)
        self.model.said(session, op, answer, self.world.now_ns)
        self.settle()
        return answer

    def _registered(self, worker_id: WorkerId, message: Registered) -> None:
        """In a new epoch the pool begins again."""
        if self.told.get(worker_id) != message.worker_epoch:
            self.model.newest = {key: value for key, value in self.model.newest.items() if key[0][0] != worker_id}
        self.told[worker_id] = message.worker_epoch
        self.keeps_disk[worker_id] = message.keeps_disk

    def without_effect(self, op: Op, session: SchedulerEpoch, expected: Answer) -> None:
        before = fingerprint(self.core)
        assert self.do(op, session) == expected
        assert fingerprint(self.core) == before

    def register(self, worker_id: WorkerId, *, fresh: bool, **more: object) -> None:
        num_blocks, num_host, num_disk = POOLS[worker_id]
        newest = {} if fresh else self.model.newest
        epoch = self.told.get(worker_id, WorkerEpoch(0))

        def reported(tier: Tier, count: int) -> bytes:
            return b"".join((newest.get(((worker_id, tier), b), 0) >> 24).to_bytes(8, "little") for b in range(count))

        message: Register = registration(
            worker_id,
            num_blocks=num_blocks,
            block_size=BLOCK,
            epoch=0 if fresh else epoch,
            highest=1 if epoch else 0,
            generations=reported(Tier.DEVICE, num_blocks),
        )
        below: dict[str, object] = {}
        for name, tier, count in (("host", Tier.HOST, num_host), ("disk", Tier.DISK, num_disk)):
            if count:
                below[f"num_{name}_blocks"] = count
                below[f"{name}_generations"], below[f"{name}_seals"] = reported(tier, count), bytes(16 * count)
        self.core.receive_worker(worker_id, replace(message, **below | more), self.world.now_ns)

    def candidates(self, which: int) -> tuple[Candidate, ...]:
        both = (Candidate(WorkerId("w"), which % 5), Candidate(WorkerId("v"), which % 3))
        return (both, both[:1], both[1:], (*both, Candidate(WorkerId("nobody"), 0)), (both[0], both[0]))[which % 5]

    def live(self, which: int) -> ModelLease:
        return one_of(list(self.model.live.values()), which)

    def acquired(self, op: Acquire, session: SchedulerEpoch) -> None:
        matches, known = {}, (session, op.lease_id) in self.model.live
        if self.core.state.domains.config(op.domain).mode is not Mode.DISABLED and not op.skip_match:
            for place in self.model.found:
                matches[place[0], place[1]] = self.model.longest(place, op.domain, op.namespace, op.tokens)
        leaders, before = list(self.model.live.values()), self.model.waiting.get((session, op.lease_id))
        answer = self.do(op, session)
        if isinstance(answer, Grant) and not known:
            assert answer.num_cached_tokens == BLOCK * matches.get((answer.worker_id, Tier.DEVICE), 0)
        elif isinstance(answer, Pending) and before is not None and before[1:] == (op, answer):
            self.model.happened["pending again"] += 1  # for what it was told before, some of which may be there by now
        elif isinstance(answer, Pending):
            prompts = [(x.grant.worker_id, x.op.domain, x.op.namespace, x.op.tokens) for x in leaders if not x.gone]
            jobs = [job for job in self.model.jobs.values() if job.goes_up and job.source_keys]
            prompts += [(job.worker_id, *job.source_keys[-1]) for job in jobs]
            assert any(
                worker_id in {candidate.worker_id for candidate in op.candidates}
                and (domain, name) == (op.domain, op.namespace)
                and common(tokens, op.tokens) >= 4 * (answer.num_tokens + BLOCK * matches[worker_id, Tier.DEVICE])
                for worker_id, domain, name, tokens in prompts
            ), "nobody of its domain computes what it should wait for"

    def wait_for(self, ms: int, heard: Sequence[SchedulerEpoch] | None = None) -> None:
        self.world.now_ns += ms * MS
        for session in self.sessions if heard is None else heard:
            self.core.heard_client(session, self.world.now_ns)
        for worker_id in POOLS:
            self.core.heard_worker(worker_id, self.world.now_ns)
        self.core.tick(self.world.now_ns)
        for session in [session for session in self.sessions if session not in self.core.state.sessions]:
            self.sessions.remove(session)
            self.model.ended(session)
            self.model.happened["session expired"] += 1
        self.settle()
        bound_ns = self.world.now_ns - CONFIG.flight_wait_ms * MS
        late = [key for key, (since_ns, *_) in self.model.waiting.items() if since_ns <= bound_ns]
        assert not late, f"never woken: {late}"

    def restart(self, worker_id: WorkerId, lost: Sequence[int]) -> None:
        """Its process ends, and another one finds its files, without those of some blocks."""
        worker = self.core.state.workers.get(worker_id)
        if worker is None or worker.disk is None:
            return
        ledger, epoch, place = worker.disk.store.ledger, worker.epoch, (worker_id, Tier.DISK)
        generations, seals = ledger.generations.copy(), ledger.seal_words.copy()
        for block in lost:
            seals[block % len(seals)] = 0
        kept = set(self.model.found.get(place, ()))
        content = {key: value for key, value in self.model.content.items() if key[0] == place}
        newest = {key: value for key, value in self.model.newest.items() if key[0] == place}
        self.model.died(worker_id)
        self.core.end_worker(worker_id, self.world.now_ns)
        self.settle()
        files = {"disk_epoch": epoch, "disk_generations": generations.tobytes(), "disk_seals": seals.tobytes()}
        self.register(worker_id, fresh=True, **files)
        self.model.content |= content
        self.model.may_appear[place] = kept
        self.settle()
        found = self.model.found.get(place, set())
        assert lost or found == kept, "what is on the disk is found again"
        if self.keeps_disk[worker_id]:
            self.model.newest |= newest
        else:
            assert not found, "what is found is of a pool that the worker gave up"
        self.model.happened["disk kept"] += bool(found)
        self.model.happened["disk cut"] += found < kept

    def make_copies(self) -> None:
        self.wait_for(100)
        for order_id, job in list(self.model.jobs.items()):
            self.model.copied_or_not(order_id, failed=False)
            done = CopiesDone(job.worker_epoch, (order_id,))
            self.core.receive_worker(job.worker_id, done, self.world.now_ns)
            self.settle()

    def teardown(self) -> None:
        """Everybody goes; nothing is left behind (I18)."""
        if not hasattr(self, "model"):
            return
        for lease in list(self.model.live.values()):
            self.do(Release(lease.op.lease_id), lease.epoch)
        for order_id in list(self.model.jobs):
            job = self.model.jobs[order_id]
            self.model.copied_or_not(order_id, failed=False)
            done = CopiesDone(job.worker_epoch, (order_id,))
            self.core.receive_worker(job.worker_id, done, self.world.now_ns)
            self.settle()
        for worker_id, fence in list(self.model.fences):
            self.model.acknowledged(worker_id, fence)
            self.core.receive_worker(worker_id, FenceAck(fence.fence_id, fence.worker_epoch), self.world.now_ns)
        self.wait_for(2_500)
        assert not self.model.waiting
        stats = self.core.stats()
        assert (stats.leased_blocks, stats.draining_blocks, stats.leases) == (0, 0, 0)
