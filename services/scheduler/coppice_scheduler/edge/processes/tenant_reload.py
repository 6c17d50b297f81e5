"""A changed tenants file reaches the cores first, then every front door.

    file --TenantsWatch--> PlannerProcesses.set_tenants --> cores --> Tenants --> front doors
                                                   \\--> the first frame of those that are started later

So no front door takes a call of a tenant that a core does not know yet. What a front door asked for before it heard
that a tenant is gone, a core refuses.
"""

from __future__ import annotations

import time

from coppice.tenants.directory import TenantDirectory
from coppice.tenants.watch import LOOK_S, TenantsWatch
from coppice_scheduler.edge.processes.claims import Claims
from coppice_scheduler.edge.processes.door_processes import DoorProcesses
from coppice_scheduler.edge.processes.planner_processes import PlannerProcesses


class TenantReload:
    """Belongs to the main thread."""

    def __init__(self, watch: TenantsWatch, planners: PlannerProcesses, doors: DoorProcesses, claims: Claims) -> None:
        self._watch = watch
        self._planners = planners
        self._doors = doors
        self._claims = claims
        self._looked_s = time.monotonic()
        self._was_refused = False
        self._wanted = False

    def want(self) -> None:
        """At the next `tend`, whatever the file looks like. For a signal handler."""
        self._wanted = True

    def tend(self) -> None:
        """Look at the file, if it is time to or somebody asked for it."""
        now_s = time.monotonic()
        if not self._wanted and now_s - self._looked_s < LOOK_S:
            return
        always, self._wanted, self._looked_s = self._wanted, False, now_s
        self._watch.look(self._apply, always=always)
        is_refused = bool(self._watch.problem)
        if is_refused != self._was_refused:
            self._was_refused = is_refused
            self._planners.tenants_refused(is_refused)

    def _apply(self, directory: TenantDirectory, content: bytes) -> None:
        self._doors.set_tenants(content)
        self._claims.keep_tenants({tenant.id for tenant in directory.tenants})
        self._planners.set_tenants(content)
