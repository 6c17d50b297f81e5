"""What schedulers count for each other of their tenants, beside what those have really served and have at work.

always     nobody counts more for the others than all others have served since the run began
at rest    what one knows of another is what that one has; nothing is at work elsewhere
           (of those of our build, and where the cache service is: the version before neither tells nor hears)
"""

from __future__ import annotations

from collections import Counter

from coppice_scheduler.core.cell.columns import rows_of
from coppice_scheduler.core.state.fairness import FairShares
from coppice_sim.base.environment import Record
from coppice_sim.base.process import Process
from coppice_sim.hosts.cluster import Cluster
from coppice_sim.hosts.scheduler import SchedulerHost


class CellWitness:
    def __init__(self, record: Record, cluster: Cluster) -> None:
        self._record = record
        self._cluster = cluster
        self._alive: dict[SchedulerHost, None] = {}  # all that were seen, in their order
        self._gone: Counter[str] = Counter()  # tokens that were served by those that died, by tenant

    def check(self, touched: set[Process]) -> None:
        """Of those that an event touched."""
        for host in sorted(touched, key=lambda host: host.name):
            if isinstance(host, SchedulerHost) and host.is_alive:
                self._alive[host] = None
        for host in [host for host in self._alive if not host.is_alive]:
            del self._alive[host]
            self._gone += served_by(host)
        if len(self._alive) > 1 or self._gone:
            for host in self._alive:
                if host in touched:
                    self._check_counted(host)

    def _check_counted(self, host: SchedulerHost) -> None:
        served = sum((served_by(other) for other in self._alive if other is not host), self._gone.copy())
        for tenant, counted in counted_by(host).items():
            if counted > served[tenant]:
                others = f"all others have served {served[tenant]}"
                self._record.fail("twice", f"{host.name} counts {counted} tokens of {tenant} elsewhere, {others}")

    def residue(self) -> list[str]:
        """What somebody does not know yet."""
        ours = self._cluster.is_of_our_build
        if not ours("cache"):
            return []
        hosts = [host for host in self._cluster.schedulers.values() if host.is_alive and ours(host.name)]
        left = []
        for host in hosts:
            for other in hosts:
                if other is not host and not knows(host, other):
                    left.append(f"{host.name} does not know what {other.name} has served")
            elsewhere = host.core._life.elsewhere
            numbers = range(host.core._life.shares.num_tenants)
            if any(elsewhere.num_at_work(number) for number in numbers):
                left.append(f"{host.name} counts what is not at work elsewhere")
        return left


def knows(host: SchedulerHost, other: SchedulerHost) -> bool:
    sums = host.core._life.elsewhere.sums_of(other.epoch)
    if sums is None:
        return False
    shares = host.core._life.shares
    for tenant, own in other.core._life.own_sums.by_tenant().items():
        number = shares.find(tenant)
        if number is None or number >= len(sums) or sums[number].tolist() != rows_of((own,))[0].tolist():
            return False
    return True


def served_by(host: SchedulerHost) -> Counter[str]:
    """Tokens of both kinds, by tenant."""
    shares: FairShares = host.core._life.shares
    prefills, outputs = shares.served_here()
    served = (prefills + outputs).astype(int).tolist()
    return Counter({shares.tenant(number): count for number, count in enumerate(served)})


def counted_by(host: SchedulerHost) -> dict[str, int]:
    """Tokens that it counts for others, by tenant."""
    shares: FairShares = host.core._life.shares
    tenants = [shares.tenant(number) for number in range(shares.num_tenants)]
    return {tenant: shares.num_elsewhere(tenant) for tenant in tenants}
