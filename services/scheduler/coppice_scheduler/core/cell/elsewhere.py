"""What the other planners of the cell said of their tenants.

    planner   listed ------- heard, heard, ... ----------- not listed any more: what it had at work is gone
    sums      the first ones of a planner that was there before us are a baseline; what comes on top of it is new
    silence   the cache service is away: what was at work counts on for `AT_WORK_LASTS_MS`, sums go on where they stood

Sums of a session grow from where it began, and sessions keep their epochs when the cache service restarts. So what is
new in them is told by what was heard under the same epoch before, and nothing is counted twice, however often it is
said. Epochs grow: one that was not heard of, and is no later than all that were, may have been here before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coppice.ids import CacheEpoch, SchedulerEpoch
from coppice.messages.cell import Planners
from coppice_scheduler.core.cell.columns import AT_WORK, NUM_GROWING, WANTS, Sums, no_sums, with_rows

AT_WORK_LASTS_MS = 10_000  # as long as a session that says nothing lives, where nothing else is set
_LASTS_NS = AT_WORK_LASTS_MS * 1_000_000


@dataclass(slots=True)
class _Planner:
    needs_baseline: bool
    listed_by: CacheEpoch  # last
    is_listed: bool = True  # on the present attachment
    sums: Sums = field(default_factory=lambda: no_sums(8))  # as heard last
    silent_since_ns: int | None = None  # None: it is listed, and the cache service is there


class Elsewhere:
    def __init__(self) -> None:
        self._planners: dict[SchedulerEpoch, _Planner] = {}
        self._newest = SchedulerEpoch(0)  # of our first epoch and those of all that were listed
        self._now = no_sums(8)  # of all planners together: only what is at work and who wants counts in it
        self._ages_ns: int | None = None  # when the next one that is silent has nothing at work any more
        self.is_told = False  # other planners are listed on the present attachment

    # --- the session to the cache service

    def attached(self, epoch: SchedulerEpoch, *, fresh: bool, now_ns: int) -> None:
        self._newest = self._newest or epoch
        if fresh:
            self.is_told = False
        for planner in self._planners.values():
            planner.is_listed = planner.is_listed and not fresh
            if planner.is_listed:
                planner.silent_since_ns = None
            elif fresh:
                planner.silent_since_ns = now_ns  # it has as long to come back
        self._set_alarm()

    def lost(self, now_ns: int) -> None:
        for planner in self._planners.values():
            if planner.silent_since_ns is None:
                planner.silent_since_ns = now_ns
        self._set_alarm()

    # --- what it says

    def list(self, message: Planners, now_ns: int) -> None:
        """Who is not listed any more is over. After a restart of the cache service it may still come back."""
        newest = self._newest
        for epoch in message.epochs:
            planner = self._planners.get(epoch)
            if planner is None:
                planner = self._planners[epoch] = _Planner(epoch <= newest, message.cache_epoch)
            planner.listed_by, planner.is_listed, planner.silent_since_ns = message.cache_epoch, True, None
            self._newest = max(self._newest, epoch)
        listed = set(message.epochs)
        for epoch, planner in list(self._planners.items()):
            if epoch not in listed and (planner.listed_by == message.cache_epoch or self._is_over(planner, now_ns)):
                self._forget(epoch)
        self.is_told = bool(message.epochs)
        self._set_alarm()

    def _forget(self, epoch: SchedulerEpoch) -> None:
        """What it had at work is gone with it; what it served was counted."""
        self._count(self._planners.pop(epoch).sums, -1)

    def hear(
        self, epoch: SchedulerEpoch, numbers: NDArray[np.int64], rows: Sums, *, is_whole: bool
    ) -> NDArray[np.int64]:
        """rows: [N, NUM_COLUMNS], of the tenants with these numbers, each once. Returns what is new of the sums that
        grow, [N, NUM_GROWING]: what they were served and charged since this planner was heard last."""
        planner = self._planners.get(epoch)
        if planner is None:
            return np.zeros((len(numbers), NUM_GROWING), np.int64)
        self._count(planner.sums, -1)
        most = int(numbers.max(initial=-1)) + 1
        planner.sums = with_rows(planner.sums, most)
        if is_whole:
            planner.sums[:, NUM_GROWING:] = 0
        before = planner.sums[numbers, :NUM_GROWING]
        planner.sums[numbers] = rows
        self._count(planner.sums, 1)
        is_new = not planner.needs_baseline
        planner.needs_baseline = False
        new: NDArray[np.int64] = np.maximum(rows[:, :NUM_GROWING] - before, 0) * is_new
        return new

    # --- what holds now

    def num_at_work(self, number: int | None) -> int:
        """Of the tenant, at all other planners."""
        return int(self._now[number, AT_WORK]) if number is not None and number < len(self._now) else 0

    def wanting(self) -> frozenset[int]:
        """Tenants that want something at another planner."""
        return frozenset(np.flatnonzero(self._now[:, WANTS]).tolist())

    def sums_of(self, epoch: SchedulerEpoch) -> Sums | None:
        """As heard last of one planner; for checks."""
        planner = self._planners.get(epoch)
        return None if planner is None else planner.sums

    # --- silence

    def ages_ns(self) -> int | None:
        """When `age` has something to do; None: never."""
        return self._ages_ns

    def age(self, now_ns: int) -> bool:
        """Planners that were silent for so long have nothing at work; whether there was one."""
        if self._ages_ns is None or now_ns < self._ages_ns:
            return False
        for planner in self._planners.values():
            if self._is_over(planner, now_ns):
                self._count(planner.sums, -1)
                planner.sums[:, NUM_GROWING:] = 0
        self._set_alarm()
        return True

    @staticmethod
    def _is_over(planner: _Planner, now_ns: int) -> bool:
        since_ns = planner.silent_since_ns
        return since_ns is not None and now_ns - since_ns >= _LASTS_NS

    def _set_alarm(self) -> None:
        since = [
            planner.silent_since_ns
            for planner in self._planners.values()
            if planner.silent_since_ns is not None and planner.sums[:, NUM_GROWING:].any()
        ]
        self._ages_ns = min(since) + _LASTS_NS if since else None

    def _count(self, sums: Sums, sign: int) -> None:
        self._now = with_rows(self._now, len(sums))
        self._now[: len(sums), NUM_GROWING:] += sign * sums[:, NUM_GROWING:]
