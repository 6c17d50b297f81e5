"""Who is within its guarantee, as far as this scheduler's own leases tell.

The cache service decides; here it only matters who may ask although another domain found the pool full, and who should
give way first when blocks run out. A prefix that a domain shares is not counted, so a domain may be taken for one that
is within its guarantee although it is not: it asks once more than it had to.
"""

from __future__ import annotations

from collections import Counter

from coppice.ids import DomainId, WorkerId
from coppice_scheduler.core.lifecycle import Lifecycle
from coppice_scheduler.core.state.leases import LeaseState
from coppice_scheduler.core.state.workers import Worker


class GuaranteeUsage:
    """Own blocks of each domain on each worker, with those that were asked for and not answered yet."""

    def __init__(self, life: Lifecycle) -> None:
        self._guarantees = life.settings.guarantees
        self._fixed = life.settings.fixed_domains
        self._held: Counter[tuple[WorkerId, DomainId]] = Counter()
        if not self._guarantees:
            return
        for lease in life.leases.leases.values():
            if lease.domain not in self._guarantees:
                continue
            if lease.state is LeaseState.ASKED:
                worker = life.workers.get(lease.expected_worker)
                self._held[lease.expected_worker, lease.domain] += blocks_for(worker, lease.reserve_asked)
            else:
                self._held[lease.worker_id, lease.domain] += lease.num_owned_blocks

    @property
    def gives_rights(self) -> bool:
        """There are domains that somebody else's shortage may not concern."""
        return bool(self._guarantees or self._fixed)

    def asked(self, worker: Worker, domain: DomainId, num_tokens: int) -> None:
        self._held[worker.worker_id, domain] += blocks_for(worker, num_tokens)

    def covers(self, worker: Worker, domain: DomainId, num_tokens: int) -> bool:
        """So many tokens more are the domain's by right: no other domain's shortage concerns it."""
        if domain in self._fixed:
            return True
        guarantee = self._guarantees.get(domain)
        if guarantee is None or worker.info is None:
            return False
        blocks = self._held[worker.worker_id, domain] + blocks_for(worker, num_tokens)
        return blocks <= guarantee.of(worker.info.num_blocks)


def blocks_for(worker: Worker | None, num_tokens: int) -> int:
    size = worker.info.block_size if worker is not None and worker.info is not None else 1
    return -(-num_tokens // size)
