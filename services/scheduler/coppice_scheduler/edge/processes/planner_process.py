"""A planner's process: started, watched, started again, ended. Lives on the service's main thread.

spawned --Standing--> plans --dies, falls silent--> spawned again, as the successor of the one before
                                                    too often: the scheduler ends; where front doors reach others, later
        --CannotServe--> the scheduler ends

Front doors find each planner at the same socket. It listens in this process, so who comes while none is there waits.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from coppice.edge.signal_event import SignalEvent
from coppice.errors import CoppiceError
from coppice_scheduler.core.state.request import SchedulerStats
from coppice_scheduler.edge.base.engine import NO_STATS
from coppice_scheduler.edge.ipc.door_messages import Stop, Tenants
from coppice_scheduler.edge.ipc.message_channel import MessageChannel
from coppice_scheduler.edge.ipc.planner_messages import (
    FROM_PLANNER,
    TO_PLANNER,
    CutOff,
    Drain,
    FromPlanner,
    Plan,
    Standing,
    TenantsRefused,
    ToPlanner,
)
from coppice_scheduler.edge.ipc.stats import with_totals
from coppice_scheduler.edge.processes.child import Child, Restarts, spawn

_log = logging.getLogger("coppice.scheduler")
START_S = 120.0
REST_S = 1.0  # front doors have brought their requests to a planner that has lived for so long


class _Planner(Child[ToPlanner, FromPlanner]):
    """What it says comes on its channel's thread."""

    def __init__(
        self, plan: Plan, listeners: Sequence[socket.socket], changed: SignalEvent, cut_off: Callable[[int], None]
    ) -> None:
        self._changed = changed
        self._cut_off = cut_off
        self.standing: Standing | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            super().__init__(spawn("coppice_scheduler.edge.planner", os.environ, theirs, *listeners))
        self.channel = MessageChannel(
            ours, TO_PLANNER, FROM_PLANNER, self._received, changed.set, peer=f"planner {self.process.pid}"
        )
        self.channel.start()
        self.channel.send(plan)

    @property
    def trouble(self) -> str:
        """What is wrong with it; empty when nothing is. One that begins may wait for its files, and say nothing."""
        if self.is_gone:
            return self.is_gone
        if self.standing is not None:
            return self.is_silent
        return f"did not begin within {START_S:.0f} s" if time.monotonic() - self.started_s > START_S else ""

    def _received(self, message: FromPlanner) -> None:
        if isinstance(message, Standing):
            self.standing = message
        elif isinstance(message, CutOff):
            self._cut_off(message.door)
            self._changed.set()
        else:
            self.cannot_serve = message


class PlannerProcess:
    """`changed` is set when `tend` has something to look at. `cut_off` is called, on another thread, with the number of
    a front door that the planner takes no more of. Methods belong to the thread that made it, properties to all.

    `others_serve`: front doors reach planners of other schedulers, so this one being away ends nothing."""

    def __init__(
        self,
        plan: Plan,
        listeners: Sequence[socket.socket],
        changed: SignalEvent,
        cut_off: Callable[[int], None],
        *,
        others_serve: bool = False,
    ) -> None:
        self._plan = plan
        self._listeners = listeners
        self._others_serve = others_serve
        self._is_down = False  # it died too often
        self._changed = changed
        self._cut_off = cut_off
        self._restarts = Restarts()
        self._has_planned = False  # one of them
        self._before = NO_STATS  # totals of those that are gone
        self._one = self._spawn()

    @property
    def stats(self) -> SchedulerStats:
        """At most a fraction of a second old. Totals are of all planners since the start."""
        standing = self._one.standing
        return with_totals(NO_STATS if standing is None else standing.stats, self._before)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why no request can be served now; empty when it can."""
        standing = self._one.standing
        return ("the planner starts",) if standing is None else standing.problems

    @property
    def cache_tenants_version(self) -> str | None:
        standing = self._one.standing
        return None if standing is None else standing.cache_tenants_version

    @property
    def is_at_rest(self) -> bool:
        """It drains, nothing is at work, and nothing is on its way here from a planner that died."""
        if self._is_down:
            return True
        standing = self._one.standing
        has_heard = time.monotonic() - self._one.started_s > REST_S
        return standing is not None and standing.is_draining and has_heard and not standing.num_requests

    def set_tenants(self, content: bytes) -> None:
        """The tenants file changed. The planner knows it before any front door does, and tells them."""
        self._plan = replace(self._plan, tenants=content)
        self._one.channel.send(Tenants(content))

    def tenants_refused(self, is_refused: bool) -> None:
        """Whether a newer tenants file is wrong; front doors say so to who asks whether they are ready."""
        self._plan = replace(self._plan, tenants_refused=is_refused)
        self._one.channel.send(TenantsRefused(is_refused))

    def drain(self) -> None:
        """Take no new request."""
        self._plan = replace(self._plan, is_draining=True)
        self._one.channel.send(Drain())

    def tend(self) -> None:
        """Look after it. Raises CoppiceError where starting again cannot help."""
        if self._is_down:
            if self._restarts.may():
                self._is_down = False
                self._one = self._spawn()
        elif trouble := self._one.trouble:
            self._start_again(trouble)

    def tell_to_stop(self) -> None:
        self._one.channel.send(Stop())

    def wait(self, grace_s: float) -> None:
        """Until it has ended, which it is made to after `grace_s`."""
        try:
            self._one.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            _log.warning("planner %d did not end in time; killed", self._one.process.pid)
        self._one.end()

    def close(self) -> None:
        """End it now."""
        self._one.end()

    def _start_again(self, trouble: str) -> None:
        one = self._one
        one.end()
        one.refuse()
        self._has_planned = self._has_planned or one.standing is not None
        may = self._has_planned and self._restarts.may()
        if not may and not (self._has_planned and self._others_serve):
            raise CoppiceError(f"the planner {trouble}", hint="see the log above; start the scheduler again")
        if one.standing is not None:
            self._before = with_totals(one.standing.stats, self._before)
            if one.standing.session is not None:
                self._plan = replace(self._plan, succeeds=one.standing.session)
        if not may:
            _log.error("planner %d %s, too often; it is started again later", one.process.pid, trouble)
            self._is_down, one.standing = True, None
            return
        _log.warning("planner %d %s; another is started, and its requests go on", one.process.pid, trouble)
        self._one = self._spawn()

    def _spawn(self) -> _Planner:
        return _Planner(self._plan, self._listeners, self._changed, self._cut_off)
