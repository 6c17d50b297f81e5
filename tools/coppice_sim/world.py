"""One cache service, workers, schedulers, a network and clients, from one seed."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from random import Random

from coppice.ids import CacheEpoch, DomainId, LeaseId, WorkerId
from coppice_cache.core.base.settings import CoreSettings, DomainConfig, Mode, TierCosts
from coppice_scheduler.core.state.settings import Guarantee, SchedulerSettings
from coppice_sim.base.names import NAMESPACE
from coppice_sim.base.network import Network
from coppice_sim.base.process import Process
from coppice_sim.base.timeline import MS, Timeline
from coppice_sim.hosts.cache import CacheHost
from coppice_sim.hosts.recovery import SimLog
from coppice_sim.hosts.scheduler import SchedulerHost
from coppice_sim.hosts.worker import WorkerHost
from coppice_sim.nemesis import FaultProfile, Nemesis
from coppice_sim.oracle import Oracle
from coppice_sim.traffic.demands import Demands
from coppice_sim.traffic.workload import Workload
from coppice_worker.core.batch.step_batch import PoolSpec
from coppice_worker.core.batch.steps import WorkerCoreSettings

BLOCK_SIZE = 4
TTL_MS = 1_000
HEAL_MS = 60_000


class BrokenInvariantError(Exception):
    """An invariant does not hold. `name` is its number in the design, or a word."""

    def __init__(self, name: str, evidence: str) -> None:
        super().__init__(f"{name}: {evidence}")
        self.name = name


@dataclass(slots=True)
class WorldSettings:
    """Sizes of one run."""

    index: CoreSettings
    domains: tuple[str, ...]
    num_workers: int
    num_blocks: int
    max_schedulers: int
    max_context: int
    step_ms: float
    max_step_tokens: int
    arrival_ms: float
    num_host_blocks: int = 0
    copy_ms: float = 0.0

    @staticmethod
    def random(rng: Random) -> WorldSettings:
        configs = (
            DomainConfig(DomainId("amber"), Mode.PRIVATE, maximum_share=rng.choice((1.0, 0.7))),
            DomainConfig(DomainId("birch"), Mode.PRIVATE, guarantee_share=rng.choice((0.0, 0.3, 0.5))),
            DomainConfig(DomainId("cedar"), Mode.STRICT, guarantee_share=0.4),
            DomainConfig(DomainId("dusk"), Mode.DISABLED, zero_on_change=True),
        )[: rng.choice((1, 2, 2, 3, 4))]
        return WorldSettings(
            index=CoreSettings(
                seal_key=b"key of the simulation",
                domains=configs,
                session_ttl_ms=TTL_MS,
                worker_ttl_ms=TTL_MS,
                heartbeat_ms=100,
                flight_tokens_min=rng.choice((1, 8)),
                flight_wait_ms=rng.choice((50, 500)),
                reclaim_grace_ms=rng.choice((40, 200)),
                record_events=True,
            ),
            domains=tuple(config.domain for config in configs),
            num_workers=rng.choice((1, 1, 2)),
            num_blocks=rng.choice((14, 20, 32, 60)),
            max_schedulers=2,
            max_context=48,
            step_ms=rng.choice((0.5, 2.0, 8.0)),
            max_step_tokens=rng.choice((8, 16, 64)),
            arrival_ms=rng.choice((10.0, 25.0, 60.0)),
        )

    def add_host_tier(self, rng: Random) -> None:
        """For two of three runs, with costs that make its use likely."""
        self.num_host_blocks = rng.choice((0, 12, 40))
        self.copy_ms = rng.choice((0.5, 5.0, 40.0))
        if self.num_host_blocks:
            self.index = replace(
                self.index,
                flight_tokens_min=rng.choice((1, 4, 8)),
                tiers=TierCosts(prefill_us_per_token=100.0, copy_us_per_block=1.0, order_us=10.0),
                demote_below_share=rng.choice((0.3, 0.6, 0.9)),
            )


@dataclass(frozen=True, slots=True)
class Scope:
    """What a run has, and how closely it is looked at.

    `check_every`: the cores check themselves, and are compared, after so many events that touched one of them; 0:
    never, so that only what clients and workers see can tell that something is wrong.
    """

    tiers: bool = True  # workers may have a host tier
    demands: bool = True  # see `Demands`
    check_every: int = 1


WHOLE = Scope()


@dataclass(slots=True)
class Totals:
    crashes: int = 0
    asked: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)


class World:
    def __init__(self, seed: int, faults: FaultProfile | None = None, scope: Scope = WHOLE) -> None:
        self.seed = seed
        self.scope = scope
        self.rng = Random(seed)
        self.settings = WorldSettings.random(self.rng)
        if scope.tiers:
            self.settings.add_host_tier(Random(f"tiers of {seed}"))  # so that runs without one are what they were
        self.demands = Demands(seed) if scope.demands else None
        if self.demands is not None:
            self.settings.index = self.demands.configured(self.settings.index)
        self.faults = faults if faults is not None else FaultProfile.random(self.rng)
        self.timeline = Timeline()
        self.network = Network(self.timeline, self.rng)
        self.sometimes: Counter[str] = Counter()
        self.internal_errors: list[str] = []
        self.domain_of_lease: dict[LeaseId, DomainId] = {}
        self.cache_epochs: list[CacheEpoch] = []
        self.history: deque[str] = deque(maxlen=40)
        self._touched: set[Process] = set()  # since the last check
        self._touched_now = False  # by the present event
        self._incarnations = 0
        self.oracle = Oracle(self)
        self.workload = Workload(self)
        self.workers: dict[str, WorkerHost] = {}
        self.schedulers: dict[str, SchedulerHost] = {}
        self.log = SimLog(self)
        self.cache = CacheHost(self)
        for number in range(self.settings.num_workers):
            self.start_worker(f"w{number}")
        self.start_scheduler("s0")
        self.nemesis = Nemesis(self)
        self._is_healing = False
        self._num_events = 0
        if self.demands is not None:
            self.demands.begin(self)
        self._arrive()

    # -- processes

    def processes(self) -> list[Process]:
        """All that are alive, in a fixed order."""
        named = [self.cache, *(self.workers[n] for n in sorted(self.workers)), *self.schedulers.values()]
        return [process for process in named if process.is_alive]

    def start_worker(self, name: str) -> None:
        settings = WorkerCoreSettings(
            worker_id=WorkerId(name),
            address=name,
            pool=PoolSpec(self.settings.num_blocks, BLOCK_SIZE),
            namespace=NAMESPACE,
            model="honest",
            max_sequences=32,
            max_context=self.settings.max_context,
            max_step_tokens=self.settings.max_step_tokens,
            num_host_blocks=self.settings.num_host_blocks,
        )
        self.workers[name] = WorkerHost(self, settings)

    def start_scheduler(self, name: str) -> None:
        self.schedulers[name] = SchedulerHost(self, name)

    def scheduler_settings(self) -> SchedulerSettings:
        configs, demands = self.settings.index.domains, self.demands
        return SchedulerSettings(
            instance=self.rng.randbytes(8),
            max_step_tokens=self.settings.max_step_tokens,
            max_running=min(8, self.settings.max_step_tokens),
            max_chunk_tokens=max(2, self.settings.max_step_tokens // 2),
            extend_more_blocks=0,  # pools are small: what is asked for ahead would be all of it
            max_queued=40,
            queue_timeout_ms=4_000,
            max_context=self.settings.max_context,
            worker_absent_ms=1_500,
            single_flight_wait_ms=800,
            fixed_domains=frozenset(config.domain for config in configs if config.mode is Mode.STRICT),
            guarantees={c.domain: Guarantee(c.guarantee_share) for c in configs if c.guarantee_share},
            maximums=demands.maximums(configs) if demands is not None else {},
            tenants=demands.limits(self.settings.domains) if demands is not None else {},
        )

    def crash(self, name: str, down_ms: int) -> None:
        process = next((p for p in self.processes() if p.name == name), None)
        if process is None:
            return
        process.die()
        self.network.reset_all(name)
        self.sometimes[f"crash of {name[0]}"] += 1
        if isinstance(process, SchedulerHost):
            self.workload.crashed(process)
        start = {"c": self._start_cache, "w": self.start_worker, "s": self.start_scheduler}[name[0]]
        self.timeline.after(down_ms * MS, lambda: start(name))

    def _start_cache(self, name: str) -> None:
        self.cache = CacheHost(self)

    def next_cache_epoch(self) -> CacheEpoch:
        """What the registry remembers; now and then it has lost it, and the workers must tell (rule 9)."""
        if not self.cache_epochs or self.rng.random() < self.faults.forgets_epoch:
            self.sometimes["epoch forgotten"] += bool(self.cache_epochs)
            return CacheEpoch(1)
        return CacheEpoch(max(self.cache_epochs) + 1)

    def next_incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    # -- domains

    def salt_of_domain(self, domain: str) -> int:
        return int.from_bytes(blake2b(domain.encode(), digest_size=8).digest(), "little")

    def salt_of_lease(self, lease: LeaseId) -> int:
        return self.salt_of_domain(self.domain_of_lease[lease])

    # -- running

    def _arrive(self) -> None:
        if self._is_healing:
            return
        hosts = [h for _, h in sorted(self.schedulers.items()) if h.is_alive and not h.is_paused]
        if hosts and self.workload.num_open < 60:
            self.workload.submit(self.rng.choice(hosts))
        self.timeline.after(int(self.rng.expovariate(1 / self.settings.arrival_ms) * MS) + 1, self._arrive)

    def touched(self, host: Process) -> None:
        self._touched.add(host)
        self._touched_now = True

    def trace(self, what: str) -> None:
        self.history.append(f"{self.timeline.now_ns / MS:10.2f} ms  {what}")

    def fail(self, name: str, evidence: str) -> None:
        raise BrokenInvariantError(name, evidence)

    def step(self) -> None:
        """One event and everything that must hold after it."""
        self.timeline.step()
        if self._touched_now:
            self._touched_now = False
            self._num_events += 1
            if self.scope.check_every and self._num_events % self.scope.check_every == 0:
                touched, self._touched = self._touched, set()
                self.oracle.check(touched)

    def heal(self) -> None:
        """Faults end, nobody asks any more; everything must come to rest within `HEAL_MS`."""
        self._is_healing = True
        self.trace("heal")
        self.nemesis.heal()
        if self.demands is not None:
            self.demands.end(self)
        deadline_ns = self.timeline.now_ns + HEAL_MS * MS
        while not self.is_at_rest():
            if self.timeline.now_ns > deadline_ns:
                self.fail("O4", f"no rest {HEAL_MS} ms after the last fault: {self._residue()}")
            for _ in range(50):
                self.step()
        if self.scope.check_every:
            self.oracle.check_all()

    def is_at_rest(self) -> bool:
        return not self._residue()

    def _residue(self) -> list[str]:
        """What is left to do or to give back."""
        left = [f"{ask.request.request_id} is open" for ask in self.workload.asks.values() if not ask.outcome]
        left += [f"{name} works" for name, host in self.schedulers.items() if not host.core.is_idle()]
        if not self.cache.is_alive:
            return [*left, "cache is down"]
        stats = self.cache.core.stats()
        if stats.leases or stats.pins or stats.leased_blocks or stats.draining_blocks:
            left.append(f"{stats.leases} leases, {stats.leased_blocks} leased, {stats.draining_blocks} draining blocks")
        left += [f"{w.worker_id} is closed or fenced" for w in stats.workers if not w.open or w.fences]
        for index in self.cache.core.state.workers.values():
            if index.host is not None and index.host.jobs:
                left.append(f"{len(index.host.jobs)} copies are under way")
            if index.reservations.waiting or index.flights.num_waiting:
                left.append(f"{len(index.reservations.waiting)} needs, {index.flights.num_waiting} wait for flights")
        for name, host in self.workers.items():
            known = self.cache.core.state.workers.get(WorkerId(name))
            if not host.is_alive or known is None or known.epoch != host.core.worker_epoch:
                left.append(f"{name} is not registered")
            if host.is_alive and (host.core.pool.has_user().any() or host.core.host_pool.has_user().any()):
                left.append(f"{name} uses blocks")
        return left
