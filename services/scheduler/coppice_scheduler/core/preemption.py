"""When a running sequence cannot get its next block: who gives way.

The victim is the latest among those who share the shortage: those of the domain on that worker when the domain is at
its maximum; when the pool is full, those of the domains that want more, or all there if each of these has only one. So
the oldest is never preempted for a younger one, and makes progress, and who floods a pool is the first to give way.
Blocks on their way back count as credit, so that one shortage preempts once; while they come nobody else is preempted.
Somebody who is alone waits: there is nobody whose blocks would help. So does everybody while the worker's ledger is
closed (`NO_WORKER`): no block can be granted then, whoever gives way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from coppice.ids import DomainId
from coppice.messages.index import NoCapacityReason
from coppice_scheduler.core.lifecycle import NS_PER_MS, Lifecycle
from coppice_scheduler.core.request import Finish, OutputError, OutputErrorCode
from coppice_scheduler.core.sequences import Sequence
from coppice_scheduler.core.workers import Stall, Worker


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


def _relieve_group(life: Lifecycle, worker: Worker, stalls: list[Stall], domain: DomainId | None, now_ns: int) -> None:
    credit = sum(
        lease.num_owned_blocks for lease in worker.returning.values() if domain is None or lease.domain == domain
    )
    while _num_refused(worker, stalls) > credit:
        sharing = _sharing(worker, stalls, domain, life.settings.fixed_domains)
        if len(sharing) < 2:
            return
        victim = choose_victim(sharing)
        credit += victim.lease.num_owned_blocks
        life.preempt(victim.request, now_ns)


def _sharing(
    worker: Worker, stalls: list[Stall], domain: DomainId | None, fixed: frozenset[DomainId]
) -> list[Sequence]:
    running = list(worker.running.values())
    if domain is not None:
        return [sequence for sequence in running if sequence.lease.domain == domain]
    counts = Counter(sequence.lease.domain for sequence in running)
    wanting = {stall.sequence.lease.domain for stall in stalls if _is_refused(worker, stall)}
    running = [s for s in running if s.lease.domain in wanting or s.lease.domain not in fixed]
    return [s for s in running if s.lease.domain in wanting and counts[s.lease.domain] > 1] or running


def choose_victim(sequences: Iterable[Sequence]) -> Sequence:
    return max(sequences, key=lambda sequence: sequence.request.order)


def _num_refused(worker: Worker, stalls: list[Stall]) -> int:
    """Stalls that nothing has come back for since they were refused."""
    return sum(_is_refused(worker, stall) for stall in stalls)


def _is_refused(worker: Worker, stall: Stall) -> bool:
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
