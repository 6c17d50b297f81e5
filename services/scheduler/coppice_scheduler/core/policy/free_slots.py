"""Places for running requests that are free: those of each strict tenant, and those that all others share.

A place is one of `max_running` and one of the sequences that its worker takes. Who asks holds one already, on each
worker that its Acquire names: it may end on any of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf

import numpy as np

from coppice.ids import WorkerId
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.state.leases import LeaseState
from coppice_scheduler.core.state.sequences import RequestState
from coppice_scheduler.core.state.workers import Worker

_Group = str | None  # a strict tenant, or None: all others


class FreeSlots:
    """Of these workers, while places are given out."""

    def __init__(self, life: Lifecycle, workers: list[Worker]) -> None:
        self._life = life
        self._shares = shares = life.slot_shares
        self._workers = workers
        self._whole = life.settings.max_running - life.counts.running - life.counts.asking
        self._free: dict[_Group, float] = {None: shares.of(None, life.settings.max_running)}
        self._on = {worker.worker_id: self._running_on(worker) for worker in workers}  # held, by group
        self._most = {worker.worker_id: inf if (most := worker.max_sequences) is None else most for worker in workers}
        self._able: dict[_Group, list[Worker]] = {}
        self._count_held()

    @property
    def may_differ(self) -> bool:
        """Somebody may have a free place while others have none."""
        return bool(self._shares.strict)

    @property
    def none_is_free(self) -> bool:
        """Of those that tenants share."""
        return not self._look(None)

    @property
    def is_overdrawn(self) -> bool:
        """Others hold more than is theirs, as the tenants file says now: one place given up would not be one free."""
        return min(self._whole, self._free[None]) < 0

    def _count_held(self) -> None:
        life, shares = self._life, self._shares
        self._free[None] -= life.counts.running + life.counts.asking
        for tenant in shares.strict:
            held = life.counts.tenant_at_places(tenant)
            self._free[tenant] = shares.of(tenant, life.settings.max_running) - held
            self._free[None] += held
        if life.counts.asking and any(most < inf for most in self._most.values()):
            for lease_id, request in life.by_lease.items():
                lease = life.leases.leases[lease_id]
                if lease.state is LeaseState.ASKED:
                    self._hold(request, lease.candidates)

    def _running_on(self, worker: Worker) -> Counter[_Group]:
        if not self._shares.strict:
            return Counter({None: len(worker.running)})
        held: Counter[_Group] = Counter()
        numbers, counts = np.unique(worker.table.tenants[worker.table.ids != 0], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            held[self._shares.group(self._life.shares.tenant(number))] += count
        return held

    def _hold(self, request: RequestState, worker_ids: Iterable[WorkerId], count: int = 1) -> None:
        group = self._shares.group(request.request.tenant)
        for worker_id in worker_ids:
            if worker_id in self._on:
                self._on[worker_id][group] += count

    # --- asked while places are given out

    def able(self, request: RequestState) -> list[Worker]:
        """Workers on which it may have a place now."""
        group = self._shares.group(request.request.tenant)
        found = self._able.get(group)
        if found is None:
            found = self._able[group] = self._look(group)
        return found

    def _look(self, group: _Group) -> list[Worker]:
        if self._whole <= 0 or self._free[group] <= 0:
            return []
        return [worker for worker in self._workers if self._room(worker.worker_id, group) > 0]

    def _room(self, worker_id: WorkerId, group: _Group) -> float:
        most, held = self._most[worker_id], self._on[worker_id]
        return min(most - held.total(), self._shares.of(group, most) - held[group])

    # --- told while places are given out

    def took(self, request: RequestState, worker_ids: Iterable[WorkerId]) -> None:
        """It asks for a place on one of these."""
        self._move(request, worker_ids, 1)

    def gave(self, request: RequestState, worker_id: WorkerId) -> None:
        """It runs no more."""
        self._move(request, [worker_id], -1)

    def _move(self, request: RequestState, worker_ids: Iterable[WorkerId], count: int) -> None:
        self._whole -= count
        self._free[self._shares.group(request.request.tenant)] -= count
        self._hold(request, worker_ids, count)
        self._able.clear()
