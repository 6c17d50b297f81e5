"""The processes of one run: started, crashed, and found by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from coppice.session.versions import SPOKEN
from coppice_cache.core.base.settings import CoreSettings
from coppice_scheduler.core.state.settings import SchedulerSettings
from coppice_sim.base.environment import Environment
from coppice_sim.base.process import Process
from coppice_sim.base.timeline import MS
from coppice_sim.base.versions import Builds
from coppice_sim.hosts.cache import CacheHost
from coppice_sim.hosts.disk_files import DiskFiles
from coppice_sim.hosts.epochs import EpochRegistry
from coppice_sim.hosts.monitor import Monitor
from coppice_sim.hosts.recovery import SimLog
from coppice_sim.hosts.scheduler import Clients, SchedulerHost
from coppice_sim.hosts.seal_keys import SealKeys
from coppice_sim.hosts.worker import WorkerHost
from coppice_sim.settings import WorldSettings
from coppice_worker.core.batch.step_batch import PoolSpec


@dataclass
class Cluster:
    """`index_settings` and `scheduler_settings` give what a process that starts now reads."""

    env: Environment
    settings: WorldSettings
    epochs: EpochRegistry
    index_settings: Callable[[], CoreSettings]
    scheduler_settings: Callable[[], SchedulerSettings]
    clients: Clients
    builds: Builds
    workers: dict[str, WorkerHost] = field(default_factory=dict)
    schedulers: dict[str, SchedulerHost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._monitor = Monitor(self.env.record, self.settings.index.domains)
        self._log = SimLog(self.env, self.settings.domains)
        self._seal_keys = SealKeys(self.env)
        self._files: dict[str, DiskFiles] = {}
        self._succession = Random(f"succession of {self.env.seed}")
        self._start_cache("cache")
        for number in range(self.settings.num_workers):
            self._start_worker(f"w{number}")
        self.start_scheduler("s0")

    def processes(self) -> list[Process]:
        """All that are alive, in a fixed order."""
        named = [self.cache, *(self.workers[n] for n in sorted(self.workers)), *self.schedulers.values()]
        return [process for process in named if process.is_alive]

    def _start_cache(self, _: str) -> None:
        self._seal_keys.service_starts()
        self.cache = CacheHost(
            self.env, self.epochs, self._log, self._index_settings, self._monitor, self.builds.of("cache")
        )

    def _index_settings(self) -> CoreSettings:
        return self._seal_keys.in_settings(self.index_settings())

    def _start_worker(self, name: str) -> None:
        sizes = self.settings
        if name not in self._files:
            pool = PoolSpec(sizes.num_disk_blocks, sizes.worker(name).pool.block_size)
            self._files[name] = DiskFiles(pool, Random(f"files of {name} in {self.env.seed}"), sizes.disk_faults)
        self.workers[name] = WorkerHost(
            self.env,
            sizes.worker(name),
            sizes.step_ms,
            sizes.copy_ms,
            sizes.disk_faults,
            self._files[name],
            self._monitor,
            self.builds.of(name),
        )

    def start_scheduler(self, name: str) -> None:
        settings, before = self.scheduler_settings(), self.schedulers.get(name)
        succeeds = before.session if before is not None and self._succession.random() < 0.7 else None
        self.schedulers[name] = SchedulerHost(
            self.env, name, settings, self._monitor, self.clients, succeeds, self.builds.of(name)
        )

    def is_of_our_build(self, name: str) -> bool:
        return self.builds.of(name) == SPOKEN

    def change_build(self, name: str) -> None:
        """It ends, and the process after it is of the other build."""
        self.env.record.sometimes["upgraded" if self.builds.change(name) else "rolled back"] += 1
        self.crash(name, down_ms=5)

    def crash(self, name: str, down_ms: int) -> None:
        if self.restart(name, down_ms):
            self.env.record.sometimes[f"crash of {name[0]}"] += 1

    def restart(self, name: str, down_ms: int) -> bool:
        """False: it is down."""
        process = next((p for p in self.processes() if p.name == name), None)
        if process is None:
            return False
        process.die()
        self.env.network.reset_all(name)
        starts = {"c": self._start_cache, "w": self._start_worker, "s": self.start_scheduler}
        self.env.timeline.after(down_ms * MS, partial(starts[name[0]], name))
        return True
