"""Sums of tenants over the whole cell: what is told of ours, and what those of others change here.

What another planner served counts in the turns of tenants, what it charged in their limits per minute, and what it has
at work in their concurrency: all of it when it is heard, at most a tick and two messages after it happened.
"""

from __future__ import annotations

import numpy as np

from coppice.ids import SchedulerEpoch
from coppice.messages.cell import TENANTS_TOLD_MAX, Planners, Served, ServedElsewhere
from coppice_scheduler.core.cell.columns import OUTPUTS, PREFILL, PROMPTS, REQUESTS, rows_of
from coppice_scheduler.core.lifecycle import Lifecycle


def attached(life: Lifecycle, epoch: SchedulerEpoch, fresh: bool, now_ns: int) -> None:
    life.own_sums.attached(epoch, fresh=fresh)
    life.elsewhere.attached(epoch, fresh=fresh, now_ns=now_ns)


def lost(life: Lifecycle, now_ns: int) -> None:
    life.elsewhere.lost(now_ns)


def planners_listed(life: Lifecycle, message: Planners, now_ns: int) -> None:
    if message.cache_epoch != life.leases.cache_epoch:
        return
    life.elsewhere.list(message, now_ns)
    life.shares.keep_elsewhere(life.elsewhere.wanting())


def served_elsewhere(life: Lifecycle, message: ServedElsewhere, now_ns: int) -> None:
    """Tenants that have no number here get one, as far as there is room: beyond it their sums count for nothing."""
    if message.cache_epoch != life.leases.cache_epoch:
        return
    shares = life.shares
    tenants = tuple(
        sums
        for sums in {sums.tenant: sums for sums in message.tenants}.values()
        if shares.find(sums.tenant) is not None or shares.num_tenants < TENANTS_TOLD_MAX
    )
    numbers = np.array([shares.number_of(sums.tenant) for sums in tenants], np.int64)
    new = life.elsewhere.hear(message.epoch, numbers, rows_of(tenants), is_whole=message.is_whole)
    wanting = life.elsewhere.wanting()
    shares.enter_elsewhere(wanting)
    shares.charge_elsewhere(numbers, new[:, PREFILL] + new[:, OUTPUTS])
    shares.keep_elsewhere(wanting)
    for at in np.flatnonzero(new.any(axis=1)).tolist():
        num_tokens = int(new[at, PROMPTS] + new[at, OUTPUTS])
        life.rate_limits.charge_elsewhere(tenants[at].tenant, int(new[at, REQUESTS]), num_tokens, now_ns)


def age(life: Lifecycle, now_ns: int) -> None:
    if life.elsewhere.age(now_ns):
        life.shares.keep_elsewhere(life.elsewhere.wanting())


def news(life: Lifecycle, now_ns: int) -> tuple[Served, ...]:
    """What the others have to hear now, if there are others."""
    message = life.own_sums.news(now_ns) if life.elsewhere.is_told else None
    return () if message is None else (message,)
