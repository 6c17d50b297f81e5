"""The tenants file changes: shares, ceilings, who is listed. Each process hears of it in its own time.

Drawn from a generator of its own, so that runs without it are what they were. A domain that must leave no trace stays
listed: a cache service that restarts without it could not know what lies there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

from coppice_cache.core.base.settings import DomainConfig, Mode
from coppice_scheduler.core.state.settings import Guarantee, Maximum, TenantLimits, TenantSettings
from coppice_sim.base.environment import Environment
from coppice_sim.base.timeline import MS
from coppice_sim.hosts.cache import CacheHost
from coppice_sim.hosts.cluster import Cluster
from coppice_sim.hosts.scheduler import SchedulerHost
from coppice_sim.traffic.demands import Demands

_LAG_MS = (0, 1, 30, 400)


def rate_of(seed: int) -> float:
    """Changes per second of virtual time, where nobody says how many."""
    return Random(f"reloads of {seed}").choice((0.0, 0.0, 1.0, 4.0))


class Reloads:
    def __init__(
        self, env: Environment, rate: float, configs: tuple[DomainConfig, ...], demands: Demands | None
    ) -> None:
        self._timeline = env.timeline
        self._record = env.record
        self._rate = rate
        self._demands = demands
        self._rng = Random(f"changes of {env.seed}")
        self._is_over = False
        self.configs = self._first = configs  # what a process that starts now reads

    def begin(self, cluster: Cluster) -> None:
        if self._rate:
            self._next(cluster)

    def end(self, cluster: Cluster) -> None:
        """As it was in the beginning, so that everybody is served."""
        self._is_over = True
        if self._rate:
            self._change(cluster, self._first, at_once=True)

    def tenants(self) -> TenantSettings | None:
        """For a scheduler; None where the file never changes."""
        if not self._rate:
            return None
        demands, names = self._demands, tuple(config.domain for config in self.configs)
        limits = demands.limits(self.configs) if demands is not None else {}
        return TenantSettings(
            limits=limits or dict.fromkeys(names, TenantLimits()),
            domains={name: name for name in names},
            fixed_domains=frozenset(config.domain for config in self.configs if config.mode is Mode.STRICT),
            guarantees={c.domain: Guarantee(c.guarantee_share) for c in self.configs if c.guarantee_share},
            maximums={c.domain: Maximum(c.maximum_share, c.maximum_blocks) for c in self.configs},
        )

    def _next(self, cluster: Cluster) -> None:
        def act() -> None:
            if not self._is_over:
                self._change(cluster, tuple(map(self._drawn, filter(self._stays, self._first))))
                self._next(cluster)

        self._timeline.after(int(self._rng.expovariate(self._rate) * 1000 * MS) + 1, act)

    def _stays(self, config: DomainConfig) -> bool:
        return config.wipes or self._rng.random() < 0.7

    def _drawn(self, config: DomainConfig) -> DomainConfig:
        if config.mode is Mode.STRICT:
            return replace(config, guarantee_share=self._rng.choice((0.2, 0.4)))
        if config.mode is Mode.DISABLED:
            return config
        share = self._rng.choice((0.0, 0.0, 0.25)) if not config.maximum_blocks else 0.0
        return replace(config, guarantee_share=share, maximum_share=self._rng.choice((1.0, 0.7, 0.5)))

    def _change(self, cluster: Cluster, configs: tuple[DomainConfig, ...], *, at_once: bool = False) -> None:
        self._record.trace(f"tenants: {', '.join(config.domain for config in configs)}")
        self._record.sometimes["tenants changed"] += 1
        self.configs = configs
        cluster.cache.after(self._lag_ns(at_once), partial(self._read_by_cache, cluster.cache))
        for host in cluster.schedulers.values():
            host.after(self._lag_ns(at_once), partial(self._read_by, host))

    def _lag_ns(self, at_once: bool) -> int:
        return 0 if at_once else self._rng.choice(_LAG_MS) * MS

    def _read_by_cache(self, host: CacheHost) -> None:
        """What the file says by now."""
        host.core.set_domains(self.configs, host.now_ns)
        host.carry_out()

    def _read_by(self, host: SchedulerHost) -> None:
        tenants = self.tenants()
        assert tenants is not None
        host.set_tenants(tenants)
