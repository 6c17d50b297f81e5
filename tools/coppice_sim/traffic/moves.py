"""What front doors do when a planner dies: they bring the requests that it served to another one, or to its successor.

dies --> a while --> the first that lives takes what is open, in order --> ... --> MOVES_MAX times at most
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from coppice_sim.base.environment import Environment
from coppice_sim.base.timeline import MS
from coppice_sim.hosts.scheduler import SchedulerHost

LOOK_MS = 5


class Moves:
    """From a generator of its own, so that runs in which no scheduler dies are what they were."""

    def __init__(self, env: Environment) -> None:
        self._rng = Random(f"moves of {env.seed}")
        self._timeline = env.timeline
        self._hosts: list[SchedulerHost] = []  # that lived when they were looked at last

    def started(self, host: SchedulerHost) -> None:
        self._hosts.append(host)

    def bring(self, to: Callable[[SchedulerHost], None]) -> None:
        """Call `to` with a scheduler that takes requests, as soon as there is one."""
        self._timeline.after(int(self._rng.expovariate(1.0) * LOOK_MS * MS), lambda: self._look(to))

    def _look(self, to: Callable[[SchedulerHost], None]) -> None:
        self._hosts = [host for host in self._hosts if host.is_alive]
        ready = [host for host in self._hosts if not host.is_paused]
        if ready:
            to(self._rng.choice(ready))
        else:
            self.bring(to)
