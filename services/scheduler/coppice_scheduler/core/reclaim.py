"""The cache service wants borrowed blocks back: preempt until so many are on their way.

`num_blocks` counts everything that the domain still has to give back there, so what returns already is credit, and a
Reclaim that is said again asks for nothing twice.
"""

from __future__ import annotations

from coppice.messages.index import Reclaim
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.places import Places
from coppice_scheduler.core.preemption import Stakes, choose_victim


def give_back(life: Lifecycle, message: Reclaim, now_ns: int) -> None:
    """Latest first. Preempted requests keep their tokens and recompute when there is room again."""
    worker = life.workers.get(message.worker_id)
    if worker is None or message.cache_epoch != life.leases.cache_epoch:
        return
    life.totals.reclaims += 1
    domain = message.domain
    credit = sum(lease.num_owned_blocks for lease in worker.returning.values() if lease.domain == domain)
    stakes, places = Stakes(worker), Places(life)
    while credit < message.num_blocks:
        found = [s for s in worker.running.values() if s.lease.domain == domain and stakes.of(s)]
        if not found:
            return
        victim = choose_victim(found, places, stakes, message.num_blocks - credit)
        credit += stakes.take(victim)
        life.preempt(victim.request, now_ns)
