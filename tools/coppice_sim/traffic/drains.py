"""Workers drain: by an operator, who lets requests in again, or because their process is to end when nothing runs.

    drain --a while, or the cache service knows and nothing runs--> undrained
      `-----nothing runs, or it takes too long--> the process ends, and another one starts

The second way waits for ever where the cache service never hears of it, and so does the end of the run. Some drain
while they register, just after their process or the cache service was started: what a worker says then may name an
epoch that is over. Drawn from a generator of its own, so that runs without it are what they were.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from coppice.ids import WorkerId
from coppice_sim.base.environment import Environment
from coppice_sim.base.timeline import MS
from coppice_sim.hosts.cluster import Cluster
from coppice_sim.hosts.worker import WorkerHost

_UNDRAINED_AFTER_MS = (1, 30, 400, 2_000)
_ENDS_AFTER_MS = (50, 700, 3_000)  # at the latest
_LOOK_MS = 10
_QUIET_LOOKS = 3
_DOWN_MS = (5, 300)
_RESTART_MS = 5


def rate_of(seed: int) -> float:
    """Drains per second of virtual time, where nobody says how many."""
    return Random(f"rate of drains of {seed}").choice((0.0, 0.0, 1.0, 4.0))


class Drains:
    def __init__(self, env: Environment, rate: float, cluster: Cluster) -> None:
        self._timeline = env.timeline
        self._network = env.network
        self._record = env.record
        self._rng = Random(f"drains of {env.seed}")
        self._rate = rate
        self._cluster = cluster
        self._is_over = False
        self._draining: dict[WorkerHost, bool] = {}  # whether its process ends
        self._kept: WorkerHost | None = None  # that drains for good
        self._num_coming = 0
        if rate:
            self._next()

    def end(self) -> None:
        """Who ends may take its time; the others take requests again when it is known that they drain. One more begins
        to drain while it registers. Or, where another one is left that does not, one drains for good."""
        self._is_over = True
        if not self._rate:
            return
        lasting = [host for host in self._cluster.workers.values() if host.is_alive and not self._draining.get(host)]
        for host in lasting:
            if host in self._draining:
                self._when_quiet(host, None, partial(self._undrain, host))
        if len(lasting) > 1 and self._rng.random() < 0.7:
            self._kept = self._rng.choice(lasting)
            several = " of several schedulers" * (len(self._cluster.schedulers) > 1)
            self._record.sometimes[f"drains to the end of the run{several}"] += 1
            self._draining[self._kept] = False
            self._kept.deliver(self._kept.drain)
        elif lasting:
            self._drain_soon(self._rng.choice(lasting).name, restarted=True, ends=False)

    def residue(self) -> list[str]:
        """Those that are still to end, or to be undrained."""
        left = [host for host in self._draining if host.is_alive and host is not self._kept]
        unsettled = [f"{host.name} drains, and was not quiet or is not known to" for host in left]
        return unsettled + ["a drain is coming"] * bool(self._num_coming)

    @property
    def _registering_ms(self) -> float:
        """From the start of a process until its registration has arrived, about."""
        return 1.0 + self._network.weather.delay_ms

    def _next(self) -> None:
        def act() -> None:
            if not self._is_over:
                self._act()
                self._next()

        self._timeline.after(int(self._rng.expovariate(self._rate) * 1000 * MS) + 1, act)

    def _act(self) -> None:
        rng = self._rng
        name, ends = rng.choice(sorted(self._cluster.workers)), rng.random() < 0.4
        if rng.random() < 0.2:
            self._cluster.restart("cache", down_ms=_RESTART_MS)
            self._drain_soon(name, restarted=False, ends=ends)
        else:
            self._drain_soon(name, restarted=rng.random() < 0.25, ends=ends)

    def _drain_soon(self, name: str, *, restarted: bool, ends: bool) -> None:
        if restarted:
            self._cluster.restart(name, down_ms=_RESTART_MS)
        self._num_coming += 1
        delay_ns = int((_RESTART_MS + self._rng.expovariate(1.0) * self._registering_ms) * MS)
        self._timeline.after(delay_ns, partial(self._drain, name, ends))

    def _drain(self, name: str, ends: bool) -> None:
        """Unless it is down, or drains already."""
        self._num_coming -= 1
        host = self._cluster.workers[name]
        self._draining = {other: ends for other, ends in self._draining.items() if other.is_alive}
        if not host.is_alive or host in self._draining:
            return
        self._record.trace(f"{name} drains{', and ends' if ends else ''}")
        self._draining[host] = ends
        host.deliver(host.drain)
        rng = self._rng
        if ends:
            until_ns = self._timeline.now_ns + rng.choice(_ENDS_AFTER_MS) * MS
            self._when_quiet(host, until_ns, lambda: self._end(host, down_ms=rng.choice(_DOWN_MS)))
        elif rng.random() < 0.5:
            self._timeline.after(rng.choice(_UNDRAINED_AFTER_MS) * MS, partial(self._undrain, host))
        else:
            self._when_quiet(host, None, partial(self._undrain, host))

    def _when_quiet(self, host: WorkerHost, until_ns: int | None, then: Callable[[], None], looks: int = 0) -> None:
        """When nothing ran for some looks, or it is time. After the last fault there is time for all that runs. Who is
        to be undrained has to be known to drain."""

        def look() -> None:
            if not host.is_alive or host not in self._draining:
                return
            is_quiet = host.is_quiet and (self._draining[host] or self._is_known(host))
            quiet = looks + 1 if is_quiet else 0
            is_late = until_ns is not None and self._timeline.now_ns >= until_ns and not self._is_over
            if quiet < _QUIET_LOOKS and not is_late:
                self._when_quiet(host, until_ns, then, quiet)
                return
            self._record.sometimes["cut while it drained" if quiet < _QUIET_LOOKS else "drained until nothing ran"] += 1
            then()

        self._timeline.after(_LOOK_MS * MS, look)

    def _is_known(self, host: WorkerHost) -> bool:
        cache = self._cluster.cache
        known = cache.core.state.workers.get(WorkerId(host.name)) if cache.is_alive else None
        return known is not None and known.epoch == host.core.worker_epoch and known.draining

    def _undrain(self, host: WorkerHost) -> None:
        if host.is_alive and host in self._draining and host is not self._kept:
            del self._draining[host]
            self._record.trace(f"{host.name} takes requests again")
            self._record.sometimes["undrained"] += 1
            host.deliver(host.undrain)

    def _end(self, host: WorkerHost, *, down_ms: int) -> None:
        del self._draining[host]
        self._cluster.restart(host.name, down_ms)
