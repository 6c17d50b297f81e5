"""Where requests wait: one line per tenant and domain (`tenant_queue.py`); the tenant that was served least goes next.

Lines per domain let a domain at its maximum be stepped over without walking its requests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from coppice.ids import DomainId, LeaseId
from coppice_scheduler.core.queue.lazy_heap import LazyHeap
from coppice_scheduler.core.queue.tenant_queue import TenantQueue
from coppice_scheduler.core.state.fairness import FairShares
from coppice_scheduler.core.state.sequences import RequestState, RequestStatus

TenantQueueKey = tuple[int, DomainId]  # the tenant's number


class WaitingQueue:
    """Requests without memory. A request that asks is out of the lines, and its deadline goes on."""

    def __init__(self, timeout_ns: int, max_overtake_ns: int) -> None:
        self._timeout_ns = timeout_ns
        self._max_overtake_ns = max_overtake_ns
        self._next_ticket = 1
        self._lines: dict[TenantQueueKey, TenantQueue] = {}
        self._changed: dict[TenantQueueKey, None] = {}  # since somebody asked, in order
        self._stays: OrderedDict[int, RequestState] = OrderedDict()  # by ticket; one timeout for all: oldest first

    def enter(self, request: RequestState, now_ns: int) -> None:
        """A new stay, with a new timeout."""
        request.ticket = self._next_ticket
        request.queued_ns = now_ns
        self._next_ticket += 1
        self._stays[request.ticket] = request
        self.place(request)

    def leave(self, request: RequestState) -> None:
        """Its stay is over: it got memory, or an outcome."""
        del self._stays[request.ticket]

    def stay_on(self, request: RequestState, now_ns: int) -> None:
        """It waited for what is no fault of the queue: its timeout starts again."""
        request.queued_ns = now_ns
        self._stays.move_to_end(request.ticket)

    def place(self, request: RequestState) -> None:
        """Into its line, where it belongs by what is known of it now."""
        key = request.tenant_number, request.request.domain
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = TenantQueue(self._max_overtake_ns)
        line.push(request)
        self._changed[key] = None

    def head(self, key: TenantQueueKey) -> RequestState | None:
        """Who goes next of this line. One that has nobody left is dropped."""
        head = self._lines[key].head()
        if head is None:
            del self._lines[key]
        return head

    def take(self, request: RequestState) -> None:
        """Out of its line: it asks."""
        key = request.tenant_number, request.request.domain
        taken = self._lines[key].pop()
        assert taken is request
        self._changed[key] = None

    def lines(self) -> list[TenantQueueKey]:
        """Of all lines; some may have nobody left in them."""
        return list(self._lines)

    def line(self, key: TenantQueueKey) -> TenantQueue | None:
        return self._lines.get(key)

    def take_changed(self) -> list[TenantQueueKey]:
        """Lines that somebody joined, or left to ask, since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def oldest(self) -> RequestState | None:
        return next(iter(self._stays.values()), None)

    def next_deadline_ns(self) -> int | None:
        oldest = self.oldest()
        return oldest.queued_ns + self._timeout_ns if oldest is not None else None


class Sleepers:
    """Requests that wait for another lease to compute their prefix, by the lease id that they asked under."""

    def __init__(self) -> None:
        self._by_id: dict[LeaseId, RequestState] = {}
        self._times: LazyHeap[tuple[int, LeaseId]] = LazyHeap(self._sleeps)

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request: RequestState) -> None:
        self._by_id[request.asked_under] = request
        self._times.push((request.wake_ns, request.asked_under))

    def remove(self, request: RequestState) -> None:
        del self._by_id[request.asked_under]

    def find(self, lease_id: LeaseId) -> RequestState | None:
        return self._by_id.get(lease_id)

    def all(self) -> list[RequestState]:
        return list(self._by_id.values())

    def next_ns(self) -> int | None:
        """When the first of them has waited long enough."""
        first = self._times.first()
        return first[0] if first is not None else None

    def due(self, now_ns: int) -> RequestState | None:
        """One that has waited long enough; it stays listed until it is removed."""
        first = self._times.first()
        return self._by_id[first[1]] if first is not None and first[0] <= now_ns else None

    def _sleeps(self, entry: tuple[int, LeaseId]) -> bool:
        request = self._by_id.get(entry[1])
        return request is not None and request.wake_ns == entry[0]


@dataclass(slots=True)
class Gate:
    """One refusal of memory, and when to ask again. While it is shut only one Acquire at a time goes through."""

    retry_ns: int
    asking: bool = False
    of_pool: bool = False  # anybody's blocks open it, not only those of its domain

    def opens(self, now_ns: int) -> bool:
        return not self.asking and self.retry_ns <= now_ns


@dataclass(slots=True)
class Gates:
    """Refusals that waiting requests have met. A full pool stops everybody who would have to borrow; who asks for what
    is its own by right (a strict share, a guarantee) goes `past` that gate, and is stopped by one of its own domain. So
    is who met its domain's maximum."""

    pool: Gate | None = None
    pool_request: RequestState | None = None  # the refused one: whose turn it is when something comes back
    domains: dict[DomainId, Gate] = field(default_factory=dict)
    fixed: frozenset[DomainId] = frozenset()

    def pool_gate(self) -> Gate | None:
        left = (RequestStatus.RUNNING, RequestStatus.SLEEPING, RequestStatus.FINISHED)
        if self.pool_request is not None and self.pool_request.status in left:
            self.pool = self.pool_request = None
        return self.pool

    def skips(self, domain: DomainId, now_ns: int) -> bool:
        gate = self.domains.get(domain)
        return gate is not None and not gate.opens(now_ns)

    def asked(self, domain: DomainId, *, past: bool) -> None:
        gate = self.domains.get(domain)
        if gate is not None:
            gate.asking = True
        if self.pool is not None and not past:
            self.pool.asking = True

    def pool_full(self, request: RequestState, retry_ns: int, *, past: bool, shares: FairShares) -> None:
        domain = request.request.domain
        if past:
            self.answered(domain, past=past)
            self.domains[domain] = Gate(retry_ns, of_pool=domain not in self.fixed)
            return
        refused = self.pool_request if self.pool_gate() is not None else None
        self.answered(domain, past=past)
        self.pool = Gate(retry_ns)
        if refused is None or _goes_before(request, refused, shares):
            self.pool_request = request

    def domain_full(self, domain: DomainId, retry_ns: int, *, past: bool) -> None:
        self.answered(domain, past=past)
        self.domains[domain] = Gate(retry_ns)

    def granted(self, domain: DomainId, *, past: bool) -> None:
        self.answered(domain, past=past)
        self.domains.pop(domain, None)

    def answered(self, domain: DomainId, *, past: bool) -> None:
        if self.pool is not None and not past:
            self.pool.asking = False
        gate = self.domains.get(domain)
        if gate is not None:
            gate.asking = False

    def freed(self, domain: DomainId) -> None:
        """Blocks came back: asking again may help now."""
        if self.pool is not None:
            self.pool.retry_ns = 0
        for name, gate in self.domains.items():
            if name == domain or gate.of_pool:
                gate.retry_ns = 0

    def reset(self) -> None:
        self.pool = self.pool_request = None
        self.domains.clear()

    def next_retry_ns(self) -> int | None:
        gates = [*self.domains.values()]
        if self.pool_gate() is not None and self.pool is not None:
            gates.append(self.pool)
        times = [gate.retry_ns for gate in gates if not gate.asking]
        return min(times) if times else None


def _goes_before(request: RequestState, other: RequestState, shares: FairShares) -> bool:
    if request.tenant_number == other.tenant_number:
        return request.order <= other.order
    return shares.counter(request.tenant_number) < shares.counter(other.tenant_number)
