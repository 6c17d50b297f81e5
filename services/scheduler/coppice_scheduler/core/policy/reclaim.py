"""The cache service wants borrowed blocks back: preempt until so many are on their way.

`num_blocks` counts everything that the domain still has to give back there, so what returns already is credit, and a
Reclaim that is said again asks for nothing twice.
"""

from __future__ import annotations

from coppice.messages.index import Reclaim
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.policy.preemption import take_back


def give_back(life: Lifecycle, message: Reclaim, now_ns: int) -> None:
    """Of the latest of that domain first."""
    worker = life.workers.get(message.worker_id)
    if worker is None or message.cache_epoch != life.leases.cache_epoch:
        return
    life.totals.reclaims += 1
    running, domain = worker.running, message.domain
    take_back(
        life,
        worker,
        domain,
        lambda: message.num_blocks,
        lambda: [sequence for sequence in running.values() if sequence.lease.domain == domain],
        now_ns,
    )
