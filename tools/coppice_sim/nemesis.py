"""Which faults happen, and when. All rates are drawn from the seed, so some runs are calm and some are wild."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from random import Random

from coppice_sim.base.environment import Environment
from coppice_sim.base.network import Weather
from coppice_sim.base.timeline import MS
from coppice_sim.hosts.cluster import Cluster


@dataclass(frozen=True, slots=True)
class FaultProfile:
    """Frequencies are per second of virtual time."""

    weather: Weather
    doubled_bodies: float = 0.0  # probability that a core is given the same message again
    crashes: float = 0.0
    pauses: float = 0.0
    partitions: float = 0.0
    resets: float = 0.0
    takeovers: float = 0.0
    cancels: float = 2.0
    reloads: float = 0.0  # of the tenants file; see `Reloads`
    drains: float = 0.0  # of workers; see `Drains`
    cache_crashes: float = 0.0  # beside `crashes`, which may hit anybody
    forgets_epoch: float = 0.0  # probability that a restarted cache service has lost its epoch counter
    lies: float = 0.0  # of somebody who claims epochs
    upgrades: float = 0.0  # restarts with the other build; see `Builds`
    more_workers: float = 0.0  # probability that the cell has one more than its seed draws

    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of trouble that it has."""
        own = [name for name in RATES if getattr(self, name)]
        return (*own, *(name for name in WEATHER if getattr(self.weather, name)))

    def without(self, kind: str) -> FaultProfile:
        """The same with one kind of trouble taken away."""
        if kind in RATES:
            return replace(self, **{kind: 0.0})  # type: ignore[arg-type]
        return replace(self, weather=replace(self.weather, **{kind: 0.0}))  # type: ignore[arg-type]

    def with_lies(self, rng: Random) -> FaultProfile:
        """In a third of all runs; from a generator of its own, so that the others are what they were."""
        return replace(self, lies=rng.choice((0.0, 0.0, 20.0)))

    def with_upgrades(self, rng: Random) -> FaultProfile:
        """In a quarter of all runs; the others are what they were."""
        return replace(self, upgrades=rng.choice((0.0, 0.0, 0.0, 2.0)))

    @staticmethod
    def none() -> FaultProfile:
        return FaultProfile(Weather(delay_ms=0.5), cancels=0.0)

    @staticmethod
    def restarts() -> FaultProfile:
        """A good network, and processes that die often."""
        return FaultProfile(Weather(delay_ms=1.0), crashes=2.5, cancels=3.0)

    @staticmethod
    def cache_restarts() -> FaultProfile:
        """The cache service dies again and again; everybody else lives."""
        return FaultProfile(Weather(delay_ms=0.5), cache_crashes=20.0, cancels=1.0)

    @staticmethod
    def lies_told() -> FaultProfile:
        """Nobody dies but the cache service now and then, and somebody claims epochs all the time."""
        return FaultProfile(Weather(delay_ms=0.5), cache_crashes=1.0, cancels=1.0, forgets_epoch=0.5, lies=60.0)

    @staticmethod
    def absences() -> FaultProfile:
        """Nobody dies, everybody is away again and again, and schedulers take over from each other."""
        weather = Weather(delay_ms=2.0, spike=0.1)
        return FaultProfile(weather, pauses=5.0, partitions=4.0, takeovers=3.0, cancels=3.0)

    @staticmethod
    def rolling() -> FaultProfile:
        """Services of two builds, which are upgraded and rolled back one by one; and schedulers come."""
        return FaultProfile(Weather(delay_ms=1.0), crashes=0.3, takeovers=2.0, cancels=2.0, upgrades=4.0)

    @staticmethod
    def draining() -> FaultProfile:
        """Workers drain all the time, and now and then somebody dies, is away or takes over meanwhile."""
        weather = Weather(delay_ms=2.0, spike=0.02)
        return FaultProfile(weather, crashes=0.5, pauses=0.5, takeovers=0.15, cancels=2.0, drains=8.0, more_workers=0.5)

    @staticmethod
    def random(rng: Random) -> FaultProfile:
        """Each kind of fault is absent in a third of all runs: too many kinds at once hide each other."""

        def some(most: float) -> float:
            return 0.0 if rng.random() < 0.34 else rng.random() * most

        weather = Weather(
            loss=some(0.3) ** 2 * 3,
            duplication=some(0.5),
            delay_ms=rng.choice((0.1, 0.5, 2.0, 8.0)),
            spike=some(0.05),
            reset=some(0.02),
        )
        return FaultProfile(
            weather=weather,
            doubled_bodies=some(0.3),
            crashes=some(2.0),
            pauses=some(2.0),
            partitions=some(1.5),
            resets=some(3.0),
            takeovers=some(1.0),
            cancels=some(10.0),
            forgets_epoch=some(0.5),
        )


RATES = tuple(field.name for field in fields(FaultProfile) if field.name != "weather")
WEATHER = ("loss", "duplication", "spike", "reset")
PROFILES: dict[str, Callable[[], FaultProfile | None]] = {
    "random": lambda: None,  # drawn from the seed
    "none": FaultProfile.none,
    "restarts": FaultProfile.restarts,
    "cache-restarts": FaultProfile.cache_restarts,
    "absences": FaultProfile.absences,
    "lies": FaultProfile.lies_told,
    "rolling": FaultProfile.rolling,
    "drains": FaultProfile.draining,
}


@dataclass
class Nemesis:
    """Lets faults happen until it is told to stop. `cancel` and `lie`: what clients and liars do then."""

    env: Environment
    faults: FaultProfile
    cluster: Cluster
    max_schedulers: int
    cancel: Callable[[], None]
    lie: Callable[[], None]
    is_over: bool = False

    def __post_init__(self) -> None:
        faults = self.faults
        self.env.network.weather = replace(faults.weather)
        for rate, action in (
            (faults.crashes, self._crash),
            (faults.cache_crashes, self._crash_cache),
            (faults.pauses, self._pause),
            (faults.partitions, self._partition),
            (faults.resets, self._reset),
            (faults.takeovers, self._takeover),
            (faults.cancels, self.cancel),
            (faults.lies, self.lie),
            (faults.upgrades, self._change_build),
        ):
            if rate > 0.0:
                self._repeat(rate, action)

    def _repeat(self, rate: float, action: Callable[[], None]) -> None:
        def again() -> None:
            if not self.is_over:
                action()
                self._repeat(rate, action)

        self.env.timeline.after(int(self.env.rng.expovariate(rate) * 1000 * MS), again)

    def heal(self) -> None:
        """From now on nothing fails."""
        self.is_over = True
        self.env.network.weather = Weather(delay_ms=0.3)
        for host in self.cluster.processes():
            host.go_on()

    def _any(self) -> str:
        """A process that lives; the cache service when none does."""
        return self.env.rng.choice([process.name for process in self.cluster.processes()] or ["cache"])

    def _crash(self) -> None:
        name = self._any()
        self.env.record.trace(f"crash {name}")
        self.cluster.crash(name, down_ms=self.env.rng.choice((5, 50, 300, 2500)))

    def _change_build(self) -> None:
        name = self._any()
        self.env.record.trace(f"other build of {name}")
        self.cluster.change_build(name)

    def _crash_cache(self) -> None:
        self.env.record.trace("crash cache")
        self.cluster.crash("cache", down_ms=self.env.rng.choice((2, 5, 20)))

    def _pause(self) -> None:
        processes = self.cluster.processes()
        if not processes:
            return
        process = self.env.rng.choice(processes)
        self.env.record.trace(f"pause {process.name}")
        process.pause()
        self.env.record.sometimes["paused"] += 1
        self.env.timeline.after(self.env.rng.choice((5, 100, 700, 2500)) * MS, process.go_on)

    def _partition(self) -> None:
        network, name = self.env.network, self._any()
        self.env.record.trace(f"partition {name}")
        network.weather.partitioned |= {name}

        def rejoin() -> None:
            network.weather.partitioned -= {name}

        self.env.timeline.after(self.env.rng.choice((20, 400, 2500)) * MS, rejoin)

    def _reset(self) -> None:
        self.env.network.reset_all(self._any())

    def _takeover(self) -> None:
        """Another scheduler comes up while the first lives, or comes back with a new session."""
        names = sorted(self.cluster.schedulers)
        if len(names) < self.max_schedulers:
            self.env.record.trace("second scheduler")
            self.cluster.start_scheduler(f"s{len(names)}")
            self.env.record.sometimes["two schedulers alive"] += 1
