"""What this planner's tenants were served, were charged and have at work, and what of it the others were told.

    now        |......... tick .........|......... tick .........|
    something changes ^                 ^ it is told

Told at multiples of the tick, whatever happens between them: when a tenant's sums leave does not depend on others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coppice.ids import SchedulerEpoch
from coppice.messages.cell import CELL_TICK_MS, TENANTS_TOLD_MAX, Served, TenantSums
from coppice_scheduler.core.cell.columns import (
    AT_WORK,
    NUM_GROWING,
    OUTPUTS,
    PREFILL,
    PROMPTS,
    REQUESTS,
    WANTS,
    Sums,
    no_sums,
    tenant_sums,
    with_rows,
)
from coppice_scheduler.core.queue.open_calls import OpenCalls
from coppice_scheduler.core.state.fairness import FairShares

CELL_TICK_NS = CELL_TICK_MS * 1_000_000


class OwnSums:
    def __init__(self, shares: FairShares, open_calls: OpenCalls) -> None:
        self._shares = shares
        self._open_calls = open_calls
        self._charged = no_sums(8)  # to limits, since the start; its other columns stay 0
        self._base = no_sums(8)  # since the start, where the session began
        self._told = no_sums(8)  # since the start, as they were told last
        self._has_told = False  # in the present session
        self._is_whole = True  # what is told next: nothing was on the present attachment
        self._epoch = SchedulerEpoch(0)
        self._due_ns: int | None = None

    def charge(self, number: int, num_tokens: int) -> None:
        """A request with a prompt of so many tokens was charged to the limits of its tenant."""
        self._charged = with_rows(self._charged, number + 1)
        self._charged[number, REQUESTS] += 1
        self._charged[number, PROMPTS] += num_tokens

    def attached(self, epoch: SchedulerEpoch, *, fresh: bool) -> None:
        """Sums of another session begin where those of the last one were told, or here if they never were."""
        if epoch != self._epoch and self._epoch:
            self._base = (self._told if self._has_told else self._since_start()).copy()
            self._has_told = False
        self._epoch = epoch
        self._is_whole = self._is_whole or fresh
        self._due_ns = None

    def due_ns(self) -> int | None:
        """When to look for what changed; None: not before something happens."""
        return self._due_ns

    def news(self, now_ns: int) -> Served | None:
        """What changed since it was told last. None: nothing did, or it is not time yet."""
        if self._due_ns is None:
            self._due_ns = (now_ns // CELL_TICK_NS + 1) * CELL_TICK_NS
        if now_ns < self._due_ns:
            return None
        self._due_ns = None
        sums = self._since_start()
        self._told = with_rows(self._told, len(sums))
        changed = (sums != self._told[: len(sums)]).any(axis=1)
        if self._is_whole:
            changed = self._of_session(sums).any(axis=1)
        elif not changed.any():
            return None
        message = Served(self._named(sums, np.flatnonzero(changed)), self._is_whole)
        self._told[: len(sums)] = sums
        self._has_told, self._is_whole = True, False
        return message

    def by_tenant(self) -> dict[str, TenantSums]:
        """Of the present session, now; for checks."""
        sums = self._since_start()
        numbers = np.flatnonzero(self._of_session(sums).any(axis=1))
        return {one.tenant: one for one in self._named(sums, numbers)}

    def _named(self, sums: Sums, numbers: NDArray[np.intp]) -> tuple[TenantSums, ...]:
        rows = zip(numbers.tolist(), self._of_session(sums)[numbers].tolist(), strict=True)
        return tuple(tenant_sums(self._shares.tenant(number), row) for number, row in rows)

    def _of_session(self, sums: Sums) -> Sums:
        self._base = with_rows(self._base, len(sums))
        rows = sums.copy()
        rows[:, :NUM_GROWING] -= self._base[: len(sums), :NUM_GROWING]
        return rows

    def _since_start(self) -> Sums:
        """Of all tenants that may be told."""
        spare = {self._shares.number_of(tenant): count for tenant, count in self._open_calls.spare_places().items()}
        prefills, outputs = self._shares.served_here()
        count = min(len(prefills), TENANTS_TOLD_MAX)
        self._charged = with_rows(self._charged, len(prefills))
        sums = self._charged.copy()  # with a row for each tenant, and more
        sums[: len(prefills), PREFILL], sums[: len(outputs), OUTPUTS] = prefills, outputs
        numbers, at_work = self._shares.at_work()
        sums[numbers, AT_WORK] = at_work
        for number, num_places in spare.items():
            sums[number, AT_WORK] += num_places
        sums[self._shares.wanting(), WANTS] = 1
        return sums[:count]
