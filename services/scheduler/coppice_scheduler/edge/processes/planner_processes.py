"""The planners of a scheduler: each a process of its own (`PlannerProcess`), with workers of its own.

The cache service shares the workers out among them. Front doors know all of them, and bring what one that died had to
the others. With more planners than workers some stand by.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from coppice.edge.signal_event import SignalEvent
from coppice_scheduler.core.state.request import SchedulerStats
from coppice_scheduler.edge.ipc.planner_messages import Plan
from coppice_scheduler.edge.ipc.stats import of_all
from coppice_scheduler.edge.processes.planner_process import PlannerProcess


class PlannerProcesses:
    """`listeners`: where front doors find each, those of other schedulers too. Else as `PlannerProcess`."""

    def __init__(
        self,
        plan: Plan,
        listeners: Sequence[Sequence[socket.socket]],
        changed: SignalEvent,
        cut_off: Callable[[int], None],
        *,
        others_serve: bool = False,
    ) -> None:
        self._planners: list[PlannerProcess] = []
        try:
            for place, of_one in enumerate(listeners):
                named = replace(plan, instance=plan.instance + bytes([place]))
                self._planners.append(PlannerProcess(named, of_one, changed, cut_off, others_serve=others_serve))
        except BaseException:
            self.close()
            raise

    @property
    def stats(self) -> SchedulerStats:
        return of_all([planner.stats for planner in self._planners])

    @property
    def problems(self) -> tuple[str, ...]:
        """Why no request can be served now; empty while one of them can serve."""
        problems = [planner.problems for planner in self._planners]
        return () if not all(problems) else tuple(dict.fromkeys(word for words in problems for word in words))

    @property
    def cache_tenants_version(self) -> str | None:
        """As one of them heard last: there is one cache service."""
        return next((v for planner in self._planners if (v := planner.cache_tenants_version) is not None), None)

    @property
    def is_at_rest(self) -> bool:
        return all(planner.is_at_rest for planner in self._planners)

    def set_tenants(self, content: bytes) -> None:
        for planner in self._planners:
            planner.set_tenants(content)

    def tenants_refused(self, is_refused: bool) -> None:
        for planner in self._planners:
            planner.tenants_refused(is_refused)

    def drain(self) -> None:
        for planner in self._planners:
            planner.drain()

    def tend(self) -> None:
        """Look after each once. Raises CoppiceError where starting one again cannot help."""
        for planner in self._planners:
            planner.tend()

    def stop(self, grace_s: float) -> None:
        """Tell all to end, and end those that have not after `grace_s`."""
        deadline_s = time.monotonic() + grace_s
        for planner in self._planners:
            planner.tell_to_stop()
        for planner in self._planners:
            planner.wait(max(deadline_s - time.monotonic(), 0))

    def close(self) -> None:
        """End them now."""
        for planner in self._planners:
            planner.close()
