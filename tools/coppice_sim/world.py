"""One cache service, workers, schedulers, a network and clients, from one seed: put together, run, brought to rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from coppice.ids import WorkerId
from coppice_cache.core.base.settings import CoreSettings, Mode
from coppice_scheduler.core.state.settings import Guarantee, SchedulerSettings
from coppice_sim.base.environment import Environment, Record
from coppice_sim.base.network import Network
from coppice_sim.base.process import Process
from coppice_sim.base.timeline import MS, Timeline
from coppice_sim.base.versions import BEFORE, Builds
from coppice_sim.cell_sums import CellWitness
from coppice_sim.hosts.cluster import Cluster
from coppice_sim.hosts.epochs import EpochRegistry
from coppice_sim.hosts.kv_honest import VOCABULARY
from coppice_sim.hosts.liar import Liar
from coppice_sim.nemesis import FaultProfile, Nemesis
from coppice_sim.oracle import Oracle
from coppice_sim.settings import WorldSettings
from coppice_sim.traffic import drains, reloads
from coppice_sim.traffic.demands import Demands
from coppice_sim.traffic.drains import Drains
from coppice_sim.traffic.observer import OUTPUT_VOCABULARY, Observer
from coppice_sim.traffic.operator import Operator
from coppice_sim.traffic.reloads import Reloads
from coppice_sim.traffic.workload import Workload

HEAL_MS = 60_000


@dataclass(frozen=True, slots=True)
class Scope:
    """What a run has, and how closely it is looked at.

    `absent`: tenants of whom no request is drawn; where there are some, the operator does nothing.
    `max_running`: of a scheduler.
    `sizes`: instead of those that the seed draws.
    `check_every`: the cores check themselves, and are compared, after so many events that touched one of them; 0:
    never, so that only what clients and workers see can tell that something is wrong.
    """

    tiers: bool = True  # workers may have a host tier
    disks: bool = True  # and a disk tier below it
    demands: bool = True  # see `Demands`; without them, all services are of one version where faults are drawn
    reloads: bool = True  # see `Reloads`; without demands there are none
    drains: bool = True  # see `Drains`; the same, where faults are drawn
    absent: frozenset[str] = frozenset()
    max_running: int = 8
    check_every: int = 1
    sizes: WorldSettings | None = None


WHOLE = Scope()


class World:
    """Makes the parts of a run, gives each what it needs, and takes one event after the other."""

    def __init__(
        self, seed: int, faults: FaultProfile | None = None, scope: Scope = WHOLE, observer: Observer | None = None
    ) -> None:
        rng = Random(seed)
        settings = scope.sizes or WorldSettings.random(rng)
        if scope.tiers:
            settings.add_host_tier(Random(f"tiers of {seed}"))  # so that runs without one are what they were
        if scope.tiers and scope.disks:
            settings.add_disk_tier(Random(f"disks of {seed}"))
        demands = Demands(seed) if scope.demands else None
        if demands is not None:
            settings.index = demands.configured(settings.index)
        if faults is None:
            drawn = FaultProfile.random(rng).with_lies(Random(f"whether anybody lies in {seed}"))
            if scope.demands:
                drawn = drawn.with_upgrades(Random(f"upgrades in {seed}"))
            changes = reloads.rate_of(seed) if scope.demands and scope.reloads else 0.0
            rate = drains.rate_of(seed) if scope.demands and scope.drains else 0.0
            faults = replace(drawn, reloads=changes, drains=rate)
        self.faults: FaultProfile = faults
        if scope.sizes is None and Random(f"one more worker in {seed}").random() < faults.more_workers:
            settings.num_workers += 1
        self._scope, self.settings, self._demands = scope, settings, demands
        self.timeline = timeline = Timeline()
        self.network = network = Network(timeline, rng)
        self.record = record = Record(timeline)
        self._rng = rng
        vocabulary = VOCABULARY if observer is None else OUTPUT_VOCABULARY
        env = Environment(seed, timeline, rng, network, record, vocabulary, faults.doubled_bodies)
        epochs = EpochRegistry(env, faults.forgets_epoch)
        self._reloads = Reloads(env, faults.reloads, settings.index.domains, demands)
        present = tuple(domain for domain in settings.domains if domain not in scope.absent)
        self.workload = Workload(env, present, settings.max_context, demands, observer)
        self._builds = builds = Builds(seed, mixed=faults.upgrades > 0)
        self.cluster = cluster = Cluster(
            env, settings, epochs, self._index_settings, self._scheduler_settings, self.workload, builds
        )
        self._oracle = Oracle(record, settings.index, cluster)
        self._cell = CellWitness(record, cluster)
        liar = Liar(env, epochs, cluster)
        self._nemesis = Nemesis(env, faults, cluster, settings.max_schedulers, self.workload.cancel_one, liar.lie)
        self._drains = Drains(env, faults.drains, cluster)
        self._unchecked: set[Process] = set()  # touched since the last check
        self._is_healing = False
        self._num_events = 0
        self._operator: Operator | None = None
        if demands is not None and not scope.absent:
            self._operator = Operator(
                env, demands.rng, demands.operator_rate, cluster, settings.domains, self.workload.a_prompt
            )
        self._reloads.begin(cluster)
        if present:
            self._arrive()

    # -- what a process that starts now reads

    def _index_settings(self) -> CoreSettings:
        return replace(self.settings.index, domains=self._reloads.configs)

    def _scheduler_settings(self) -> SchedulerSettings:
        sizes, configs, demands = self.settings, self.settings.index.domains, self._demands
        max_queued, max_queued_tokens = demands.queue_sizes() if demands is not None else (40, 1 << 22)
        settings = SchedulerSettings(
            instance=self._rng.randbytes(8),
            max_step_tokens=sizes.max_step_tokens,
            max_running=min(self._scope.max_running, sizes.max_step_tokens),
            max_chunk_tokens=max(2, sizes.max_step_tokens // 2),
            extend_more_blocks=0,  # pools are small: what is asked for ahead would be all of it
            max_queued=max_queued,
            max_queued_tokens=max_queued_tokens,
            queue_timeout_ms=4_000,
            max_context=sizes.max_context,
            worker_absent_ms=1_500,
            quarantine_ms=demands.quarantine_ms() if demands is not None else 0,
            single_flight_wait_ms=800,
            max_retries=demands.max_retries() if demands is not None else 1,
            fixed_domains=frozenset(config.domain for config in configs if config.mode is Mode.STRICT),
            guarantees={c.domain: Guarantee(c.guarantee_share) for c in configs if c.guarantee_share},
            maximums=demands.maximums(configs) if demands is not None else {},
            tenants=demands.limits(configs) if demands is not None else {},
        )
        tenants = self._reloads.tenants()
        return settings.with_tenants(tenants) if tenants is not None else settings

    # -- running

    def _arrive(self) -> None:
        if self._is_healing:
            return
        hosts = [h for _, h in sorted(self.cluster.schedulers.items()) if h.is_alive and not h.is_paused]
        if hosts and self.workload.num_open < 60:
            self.workload.submit(self._rng.choice(hosts))
        self.timeline.after(int(self._rng.expovariate(1 / self.settings.arrival_ms) * MS) + 1, self._arrive)

    def step(self) -> None:
        """One event and everything that must hold after it."""
        self.timeline.step()
        if self.record.touched:
            self._unchecked |= self.record.touched
            self.record.touched.clear()
            self._num_events += 1
            if self._scope.check_every and self._num_events % self._scope.check_every == 0:
                touched, self._unchecked = self._unchecked, set()
                self._oracle.check(touched)
                self._cell.check(touched)

    def heal(self) -> None:
        """Faults end, nobody asks any more; everything must come to rest within `HEAL_MS`."""
        self._is_healing = True
        self.record.trace("heal")
        self._nemesis.heal()
        if self._operator is not None:
            self._operator.end()
        self._reloads.end(self.cluster)
        self._drains.end()
        deadline_ns = self.timeline.now_ns + HEAL_MS * MS
        while residue := self._residue():
            if self.timeline.now_ns > deadline_ns:
                self.record.fail("O4", f"no rest {HEAL_MS} ms after the last fault: {residue}")
            for _ in range(50):
                self.step()
        if self._scope.check_every:
            self._oracle.check_all()

    def _badly_shared(self) -> list[str]:
        """Workers that no living scheduler plans for, those that somebody is to leave and does not, and schedulers that
        have two more than another, of those that do not drain. With a scheduler or a worker of the build before it may
        stay uneven, and a cache service of that build knows nothing of it."""
        cache = self.cluster.cache
        if cache.speaks == BEFORE:
            return []
        workers = cache.core.state.workers.values()
        owned = {host.epoch: 0 for host in self.cluster.schedulers.values()}
        for worker in workers:
            if worker.owner not in owned:
                return [f"{worker.worker_id} is nobody's"]
            host = self.cluster.workers.get(worker.worker_id)  # None: of somebody who lies
            owned[worker.owner] += host is None or not host.core.is_draining
        uneven = max(owned.values()) - min(owned.values()) > 1 and len({w.num_blocks for w in workers}) == 1
        uneven = uneven and self._builds.are_ours
        return [f"workers are shared unevenly: {owned}"] if uneven or any(w.yields for w in workers) else []

    def _drains_unheard_of(self) -> list[str]:
        """Of whom the cache service, or a scheduler that may plan there, believes that it drains, or does not. One of
        the build before takes what it does not own for a worker that drains."""
        left = []
        for name, host in self.cluster.workers.items():
            drains, known = host.core.is_draining, self.cluster.cache.core.state.workers.get(WorkerId(name))
            if known is not None and known.draining != drains:
                left.append(f"{name} {'drains' if drains else 'does not drain'}, and the cache does not know")
            for scheduler in self.cluster.schedulers.values():
                seen = scheduler.core._life.workers.get(WorkerId(name))
                info = None if seen is None or not self._builds.are_ours else seen.info
                if info is not None and info.draining != drains:
                    left.append(f"{scheduler.name} does not know whether {name} drains")
        return left

    def _residue(self) -> list[str]:
        """What is left to do or to give back."""
        cache, schedulers = self.cluster.cache, self.cluster.schedulers
        left = [f"{ask.request.request_id} is open" for ask in self.workload.asks.values() if not ask.outcome]
        left += [f"{name} works" for name, host in schedulers.items() if not host.core.is_idle()]
        if not cache.is_alive:
            return [*left, "cache is down"]
        stats = cache.core.stats()
        if stats.leases or stats.pins or stats.leased_blocks or stats.draining_blocks:
            left.append(f"{stats.leases} leases, {stats.leased_blocks} leased, {stats.draining_blocks} draining blocks")
        left += [f"{w.worker_id} is closed or fenced" for w in stats.workers if not w.open or w.fences]
        for index in cache.core.state.workers.values():
            if index.host is not None and index.host.jobs:
                left.append(f"{len(index.host.jobs)} copies are under way")
            if index.reservations.waiting or index.flights.num_waiting:
                left.append(f"{len(index.reservations.waiting)} needs, {index.flights.num_waiting} wait for flights")
        left += self._badly_shared() + self._cell.residue() + self._drains.residue() + self._drains_unheard_of()
        for name, host in self.cluster.workers.items():
            known = cache.core.state.workers.get(WorkerId(name))
            if not host.is_alive or known is None or known.epoch != host.core.worker_epoch:
                left.append(f"{name} is not registered")
            if host.is_alive and (host.core.pool.has_user().any() or host.core.host_pool.has_user().any()):
                left.append(f"{name} uses blocks")
        return left
