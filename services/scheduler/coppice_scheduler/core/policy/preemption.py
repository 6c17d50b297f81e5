"""When a running sequence cannot get its next block: who gives way.

The victim is the latest among those who share the shortage: those of the domain on that worker when the domain is at
its maximum; when the pool is full, those of the domains that want more, or all there if each of these has only one. So
the oldest is never preempted for a younger one, and makes progress, and who floods a pool is the first to give way.
What is within a guarantee is no victim of a full pool: a domain below its own takes from those that borrow, as the
cache service will have them do anyway, and one that borrows takes from no guarantee.
Blocks on their way back count as credit, so that one shortage preempts once; while they come nobody else is preempted.
Whoever holds no block alone is not preempted: nothing would come back (I17).
Somebody who is alone starts over: nobody else's blocks would help, but its own may. What it published while another
published the same counts twice for as long as it runs, and asking anew finds it; and if it asks for what can never be
had, it hears so. While the worker's ledger is closed (`NO_WORKER`) everybody waits: no block can be granted then,
whoever gives way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from coppice.handles import handles_array
from coppice.ids import DomainId
from coppice.messages.index import NoCapacityReason, Reclaim
from coppice.request_log.stages import Preemption, StageKind
from coppice_scheduler.core.lifecycle import NS_PER_MS, Lifecycle
from coppice_scheduler.core.policy.guarantee_usage import GuaranteeUsage
from coppice_scheduler.core.policy.running_slots import EXCESS_SLACK, RunningSlots
from coppice_scheduler.core.state.request import Finish, OutputError, OutputErrorCode
from coppice_scheduler.core.state.sequences import Sequence
from coppice_scheduler.core.state.workers import Stall, Worker


class Stakes:
    """How many blocks come back when a sequence gives way: those that no other running one of the worker holds."""

    def __init__(self, worker: Worker) -> None:
        leases = [sequence.lease for sequence in worker.running.values()]
        handles = handles_array(b"".join(lease.shared + lease.owned for lease in leases))
        _, running_slots, self._holders = np.unique(handles, return_inverse=True, return_counts=True)
        ends = np.cumsum([lease.num_shared_blocks + lease.num_owned_blocks for lease in leases])
        parts = np.split(running_slots, ends[:-1]) if leases else []
        self._places = dict(zip(worker.running, parts, strict=True))

    def of(self, sequence: Sequence) -> int:
        running_slots = self._places[sequence.sequence_id]
        return int((self._holders[running_slots] == 1).sum())

    def take(self, sequence: Sequence) -> int:
        """The sequence gives way; what it shared may be held by one other alone now."""
        blocks = self.of(sequence)
        self._holders[self._places.pop(sequence.sequence_id)] -= 1
        return blocks


def relieve(life: Lifecycle, worker: Worker, now_ns: int) -> None:
    """Preempt as many as the stalled sequences of this worker need, and no more."""
    _end_overdue(life, worker, now_ns)
    full = [stall for stall in worker.stalled.values() if stall.reason is NoCapacityReason.POOL_FULL]
    if full:
        _relieve_group(life, worker, full, None, now_ns)
    domains = {
        stall.sequence.lease.domain
        for stall in worker.stalled.values()
        if stall.reason is NoCapacityReason.DOMAIN_MAXIMUM
    }
    for domain in sorted(domains):
        stalls = [
            stall
            for stall in worker.stalled.values()
            if stall.reason is NoCapacityReason.DOMAIN_MAXIMUM and stall.sequence.lease.domain == domain
        ]
        _relieve_group(life, worker, stalls, domain, now_ns)
    for stall in list(worker.stalled.values()):
        if _is_refused(worker, stall) and _is_alone(life, worker, stall):
            life.restart(stall.sequence.request, now_ns)


def _is_alone(life: Lifecycle, worker: Worker, stall: Stall) -> bool:
    """Nobody holds, or is about to give back, blocks that it could have."""
    own = stall.sequence.lease
    if stall.reason is NoCapacityReason.NO_WORKER:
        return False
    leases = [*(sequence.lease for sequence in worker.running.values()), *worker.returning.values()]
    if stall.reason is NoCapacityReason.DOMAIN_MAXIMUM:
        leases = [lease for lease in leases if lease.domain == own.domain]
    fixed = life.settings.fixed_domains
    return all(lease is own or (lease.domain in fixed and lease.domain != own.domain) for lease in leases)


def _relieve_group(life: Lifecycle, worker: Worker, stalls: list[Stall], domain: DomainId | None, now_ns: int) -> None:
    take_back(
        life,
        worker,
        domain,
        lambda: sum(_is_refused(worker, stall) for stall in stalls),
        lambda: _sharing(life, worker, stalls, domain),
        Preemption.POOL if domain is None else Preemption.DOMAIN,
        now_ns,
    )


def take_back(
    life: Lifecycle,
    worker: Worker,
    domain: DomainId | None,
    num_needed: Callable[[], int],
    among: Callable[[], list[Sequence]],
    why: Preemption,
    now_ns: int,
) -> None:
    """Preempt one at a time until so many blocks (of this domain) are on their way back, or nobody has one to give.

    Preempted requests keep their tokens and recompute when there is room again.
    """
    returning = [lease for lease in worker.returning.values() if domain is None or lease.domain == domain]
    credit = sum(lease.num_owned_blocks for lease in returning)
    if num_needed() <= credit:
        return
    stakes, running_slots = Stakes(worker), RunningSlots(life)
    while (num_lacking := num_needed() - credit) > 0:
        found = [sequence for sequence in among() if stakes.of(sequence)]
        if not found:
            return
        victim = _choose_victim(found, running_slots, stakes, num_lacking)
        credit += stakes.take(victim)
        life.preempt(victim.request, why, now_ns)


def _sharing(life: Lifecycle, worker: Worker, stalls: list[Stall], domain: DomainId | None) -> list[Sequence]:
    """Among whom the victim is; nobody, where it would be the one that wants."""
    running = list(worker.running.values())
    if domain is not None:
        running = [sequence for sequence in running if sequence.lease.domain == domain]
        return _but_oldest(running)
    wanting = {stall.sequence.lease.domain for stall in stalls if _is_refused(worker, stall)}
    guarantee_usage = GuaranteeUsage(life)
    within = {sequence.lease.domain for sequence in running if guarantee_usage.covers(worker, sequence.lease.domain, 0)}
    borrowing = [sequence for sequence in running if sequence.lease.domain not in within]
    if wanting & within and borrowing:
        return borrowing
    running = [s for s in running if s.lease.domain in wanting or s.lease.domain not in within]
    counts = Counter(sequence.lease.domain for sequence in running)
    found = [s for s in running if s.lease.domain in wanting and counts[s.lease.domain] > 1] or running
    return _but_oldest(found)


def _but_oldest(sequences: list[Sequence]) -> list[Sequence]:
    """The first of the best priority is never the victim, so somebody always gets on."""
    return sorted(sequences, key=lambda sequence: sequence.request.order)[1:]


def _choose_victim(
    sequences: Iterable[Sequence], running_slots: RunningSlots, stakes: Stakes, num_lacking: int
) -> Sequence:
    """Of a tenant over its share of the places, then of the least priority, then one whose blocks are enough, then the
    latest."""

    def how_fit(sequence: Sequence) -> tuple[bool, int, bool, int]:
        request = sequence.request
        priority, arrival = request.order
        is_over = running_slots.excess(request.tenant_number) > EXCESS_SLACK
        return is_over, priority, stakes.of(sequence) >= num_lacking, arrival

    return max(sequences, key=how_fit)


def _is_refused(worker: Worker, stall: Stall) -> bool:
    """It still stalls, and nothing has come back since it was refused."""
    return stall.refused and stall.sequence.sequence_id in worker.stalled


def _end_overdue(life: Lifecycle, worker: Worker, now_ns: int) -> None:
    timeout_ms = life.settings.queue_timeout_ms
    overdue = [stall for stall in worker.stalled.values() if now_ns - stall.since_ns >= timeout_ms * NS_PER_MS]
    for stall in overdue:
        error = stall_error(worker, stall, timeout_ms)
        life.finish(stall.sequence.request, Finish.ERROR, now_ns, error=error)


def stall_error(worker: Worker, stall: Stall, timeout_ms: int) -> OutputError:
    if stall.reason is NoCapacityReason.DOMAIN_MAXIMUM:
        return OutputError(
            OutputErrorCode.TENANT_MAXIMUM,
            f"domain {stall.sequence.lease.domain} held its maximum of blocks on worker {worker.worker_id} for "
            f"{timeout_ms} ms; send fewer or shorter requests at a time",
            retry_after_ms=timeout_ms,
        )
    return OutputError(
        OutputErrorCode.QUEUE_TIMEOUT,
        f"no block came free on worker {worker.worker_id} for {timeout_ms} ms; send it again later",
        retry_after_ms=timeout_ms,
    )


def give_back(life: Lifecycle, message: Reclaim, now_ns: int) -> None:
    """The cache service wants borrowed blocks back: preempt the latest of that domain until so many are on their way.

    `num_blocks` counts everything that the domain still has to give back there, so what returns already is credit, and
    a Reclaim that is said again asks for nothing twice.
    """
    worker = life.workers.get(message.worker_id)
    if worker is None or message.cache_epoch != life.leases.cache_epoch:
        return
    life.totals.reclaims += 1
    _tell_of_reclaim(life, message, now_ns)
    running, domain = worker.running, message.domain
    take_back(
        life,
        worker,
        domain,
        lambda: message.num_blocks,
        lambda: [sequence for sequence in running.values() if sequence.lease.domain == domain],
        Preemption.GUARANTEE,
        now_ns,
    )


def _tell_of_reclaim(life: Lifecycle, message: Reclaim, now_ns: int) -> None:
    """Those who wait for blocks learn that some were asked back, and of whom."""
    life.shortages.happened(StageKind.ASKED_BACK, now_ns, message.domain, message.num_blocks)
    for key in life.queue.lines():
        request = life.queue.head(key)
        if request is not None and request.history.kind is StageKind.POOL_FULL:
            request.history.happened(StageKind.ASKED_BACK, now_ns, message.domain, message.num_blocks)
