"""What the cache service's answers change, and which ops go out next."""

from __future__ import annotations

import numpy as np

from coppice.handles import HANDLE_BYTES
from coppice.messages.index import (
    Acquire,
    Answer,
    Distrust,
    Extend,
    Extended,
    Gone,
    Grant,
    Invalid,
    NoCapacity,
    NoCapacityReason,
    Op,
    Pending,
    Publish,
    Published,
    Retain,
)
from coppice.request_log.stages import StageKind
from coppice.seals import SEAL_BYTES
from coppice_scheduler.core.kv_client.acquires import choose_acquires
from coppice_scheduler.core.lifecycle import NS_PER_MS, Lifecycle
from coppice_scheduler.core.policy.admission import tokens_held_max
from coppice_scheduler.core.queue.shortages import most_blocks
from coppice_scheduler.core.state.leases import Lease
from coppice_scheduler.core.state.request import Finish, OutputError, OutputErrorCode
from coppice_scheduler.core.state.sequences import RequestState, Sequence
from coppice_scheduler.core.state.workers import Stall, Worker

# --- answers

_NOT_ASKED_RETRY_NS = 500 * NS_PER_MS
_OF_DOMAIN = (  # they hold up nobody else
    NoCapacityReason.DOMAIN_MAXIMUM,
    NoCapacityReason.DOMAIN_UNKNOWN,
    NoCapacityReason.NEVER_FITS,
)
_STAGES = {
    NoCapacityReason.POOL_FULL: StageKind.POOL_FULL,
    NoCapacityReason.DOMAIN_MAXIMUM: StageKind.DOMAIN_MAXIMUM,
    NoCapacityReason.DOMAIN_UNKNOWN: StageKind.DOMAIN_UNKNOWN,
    NoCapacityReason.NO_WORKER: StageKind.NO_WORKER,
}


def take_answer(life: Lifecycle, op: Op, answer: Answer, now_ns: int) -> None:
    lease = life.leases.leases.get(op.lease_id)
    if lease is None:
        return
    if isinstance(op, Acquire):
        _acquired(life, lease, answer, now_ns)
    elif isinstance(op, Extend):
        _extended(life, lease, op, answer, now_ns)
    elif isinstance(op, Publish):
        _published(life, lease, answer, now_ns)
    elif isinstance(op, Retain):
        if isinstance(answer, Gone):
            lease_lost(life, lease, now_ns)
    elif not isinstance(op, Distrust):
        life.released(lease)


def _acquired(life: Lifecycle, lease: Lease, answer: Answer, now_ns: int) -> None:
    request = life.by_lease.get(lease.lease_id)  # None: it ended meanwhile
    if isinstance(answer, Grant):
        life.gates.granted(lease.domain, past=lease.past_gate)
        _granted(life, lease, request, answer, now_ns)
        return
    life.leases.forget(lease)
    life.gates.answered(lease.domain, past=lease.past_gate)
    if isinstance(answer, NoCapacity | Pending) and request is None:
        life.leases.disown(lease.lease_id)
    elif isinstance(answer, NoCapacity):
        _no_room(life, request, lease, answer, now_ns)
    elif isinstance(answer, Pending) and request is not None:
        life.sleep(request, lease, answer.num_tokens, max(1, answer.retry_after_ms), now_ns)
    elif isinstance(answer, Gone) and lease.asked_before and request is not None:
        life.unask(request)  # the id was granted behind our back, and fenced; another one is as good
    elif request is not None:
        text = answer.message if isinstance(answer, Invalid) else f"it answered {type(answer).__name__}"
        error = OutputError(OutputErrorCode.INTERNAL, f"the cache service did not take the request: {text}")
        life.finish(request, Finish.ERROR, now_ns, error=error)


def _granted(life: Lifecycle, lease: Lease, request: RequestState | None, grant: Grant, now_ns: int) -> None:
    worker = life.workers.get(grant.worker_id)
    info = worker.info if worker is not None else None
    life.leases.grant(lease, grant, info.block_size if info is not None else 1)
    if request is None:
        life.release(lease)
    elif worker is None or not worker.attached or worker.abandoned or worker.epoch != grant.worker_epoch:
        life.release(lease)
        life.unask(request)
    elif not _grant_is_sound(lease, grant, request):
        life.release(lease)
        life.unask(request)
        error = OutputError(OutputErrorCode.INTERNAL, "the cache service granted blocks that do not fit the request")
        life.finish(request, Finish.ERROR, now_ns, error=error)
    else:
        life.start(request, lease, grant, now_ns)


def _grant_is_sound(lease: Lease, grant: Grant, request: RequestState) -> bool:
    return (
        lease.reserved_tokens >= lease.reserve_asked
        and grant.num_cached_tokens == lease.num_shared_blocks * lease.block_size
        and grant.num_cached_tokens + grant.num_copy_tokens < request.num_tokens
        and grant.num_copy_tokens < lease.block_size
        and len(grant.shared_seals) == lease.num_shared_blocks * SEAL_BYTES
    )


def _no_room(life: Lifecycle, request: RequestState | None, lease: Lease, answer: NoCapacity, now_ns: int) -> None:
    reason, retry_ns = answer.reason, now_ns + max(1, answer.retry_after_ms) * NS_PER_MS
    if not lease.names_all:
        if request is not None:
            life.refused(request, lease)  # others may have room: it asks all of them next
        return
    if reason is NoCapacityReason.NEVER_FITS:
        if request is None:
            return
        if not _fits_one_not_asked(life, lease):
            life.finish(request, Finish.ERROR, now_ns, error=_never_fits(request, lease.reserve_asked))
            return
        reason, retry_ns = NoCapacityReason.NO_WORKER, now_ns + _NOT_ASKED_RETRY_NS
    if request is not None:
        life.refused(request, lease)
        request.no_room = reason
        _note_shortage(life, request, reason, now_ns)
    if answer.reason in _OF_DOMAIN:
        life.gates.domain_full(lease.domain, retry_ns, past=lease.past_gate)
    elif request is not None:
        life.gates.pool_full(request, retry_ns, past=lease.past_gate, shares=life.shares)


def _fits_one_not_asked(life: Lifecycle, lease: Lease) -> bool:
    """A worker of ours that was not asked could hold it: it drains, is to be left or has no place now."""
    return any(
        worker.info is not None
        and worker.info.is_owned
        and worker.worker_id not in lease.candidates
        and tokens_held_max(life, lease.domain, worker.info) >= lease.reserve_asked
        for worker in life.workers.values()
    )


def _note_shortage(life: Lifecycle, request: RequestState, reason: NoCapacityReason, now_ns: int) -> None:
    """In its history: what it lacks, and who has it."""
    kind = _STAGES.get(reason, StageKind.QUEUED)
    if kind is request.history.kind:
        return
    blocker, amount = "", 0
    if kind is StageKind.POOL_FULL:
        blocker, amount = most_blocks(life.workers.values())
    elif kind is StageKind.DOMAIN_MAXIMUM:
        blocker = request.request.domain
    request.history.becomes(kind, now_ns, blocker, amount)


def _never_fits(request: RequestState, num_tokens: int) -> OutputError:
    return OutputError(
        OutputErrorCode.NEVER_FITS,
        f"{num_tokens} tokens need more blocks than the pool, or domain {request.request.domain}, can ever give; "
        "shorten the prompt or max_new_tokens",
    )


def _extended(life: Lifecycle, lease: Lease, op: Extend, answer: Answer, now_ns: int) -> None:
    lease.extend_asked = 0
    sequence = _sequence_of(life, lease)
    if isinstance(answer, Extended):
        new = lease.take_blocks(answer.first_block, answer.owned)
        if sequence is None:
            return
        sequence.take_blocks(new, answer.zero, life.num_ahead(lease))
        if lease.reserved_tokens < op.reserve_tokens:
            _fault(life, sequence, f"the answer covers {lease.reserved_tokens} of {op.reserve_tokens} tokens", now_ns)
        else:
            if life.workers[lease.worker_id].stalled.pop(sequence.sequence_id, None) is not None:
                sequence.request.history.becomes(StageKind.DECODE, now_ns, lease.worker_id)
    elif isinstance(answer, Gone):
        lease_lost(life, lease, now_ns)
    elif sequence is None:
        return
    elif isinstance(answer, NoCapacity):
        _refused_blocks(life, sequence, op, answer, now_ns)
    else:
        text = answer.message if isinstance(answer, Invalid) else f"it answered {type(answer).__name__}"
        _fault(life, sequence, text, now_ns)


def _fault(life: Lifecycle, sequence: Sequence, text: str, now_ns: int) -> None:
    error = OutputError(OutputErrorCode.INTERNAL, f"the cache service could not extend the request: {text}", 1000)
    life.retry(sequence.request, error, now_ns)


def _sequence_of(life: Lifecycle, lease: Lease) -> Sequence | None:
    request = life.by_lease.get(lease.lease_id)
    return None if request is None else request.sequence


def _refused_blocks(life: Lifecycle, sequence: Sequence, op: Extend, answer: NoCapacity, now_ns: int) -> None:
    if answer.reason is NoCapacityReason.NEVER_FITS and op.reserve_tokens <= sequence.num_planned + 1:
        error = _never_fits(sequence.request, op.reserve_tokens)
        life.finish(sequence.request, Finish.ERROR, now_ns, error=error)
        return
    sequence.forgo_ahead()
    if op.reserve_tokens > sequence.num_planned + 1 or not sequence.blocked:
        return  # more than the need: its next plan, or what it lacks then, asks for the need alone
    stalled = life.workers[sequence.lease.worker_id].stalled
    retry_ns = now_ns + max(1, answer.retry_after_ms) * NS_PER_MS
    stall = stalled.get(sequence.sequence_id)
    since_ns = now_ns if stall is None else stall.since_ns
    stalled[sequence.sequence_id] = Stall(sequence, answer.reason, since_ns, retry_ns)
    _note_shortage(life, sequence.request, answer.reason, now_ns)


def _published(life: Lifecycle, lease: Lease, answer: Answer, now_ns: int) -> None:
    if isinstance(answer, Published):
        lease.num_published = max(lease.num_published, answer.num_published_blocks)
        worker = life.workers.get(lease.worker_id)
        if worker is not None and worker.attached and worker.epoch == lease.worker_epoch:
            assert len(answer.handles) // HANDLE_BYTES == len(answer.seals) // SEAL_BYTES
            worker.sealed += answer.handles
            worker.seals += answer.seals
    elif isinstance(answer, Gone):
        lease_lost(life, lease, now_ns)
    else:
        lease.publishable = False


def lease_lost(life: Lifecycle, lease: Lease, now_ns: int) -> None:
    """The cache service does not know it any more; the worker learns of it by a fence, we now.

    Should it restart before that fence is acknowledged, the next one has to hear of the lease (see `abandon`).
    """
    sequence = _sequence_of(life, lease)
    life.leases.lost(lease)
    life.released(lease)
    if sequence is not None:
        error = OutputError(
            OutputErrorCode.SESSION_LOST, "the cache service lost this request's lease; send it again", 1000
        )
        life.retry(sequence.request, error, now_ns)


# --- ops


def collect_ops(life: Lifecycle, now_ns: int) -> list[Op]:
    """One batch: what fills, then what comes back, then who needs more, then who comes in."""
    ops = life.leases.take_publishes() + life.leases.take_retentions()
    ops += life.leases.take_settling()
    for worker in life.workers.values():
        ops += _extends(life, worker, now_ns)
    ops += choose_acquires(life, now_ns)
    return ops


def _extends(life: Lifecycle, worker: Worker, now_ns: int) -> list[Op]:
    wanting = list(worker.wants_blocks.values())
    wanting += [stall.sequence for stall in worker.stalled.values() if stall.retry_ns <= now_ns]
    worker.wants_blocks.clear()
    if not wanting:
        return []
    wanting.sort(key=lambda sequence: sequence.request.order)
    table, slots = worker.table, np.array([sequence.slot for sequence in wanting])
    counts = (table.num_needed(slots), table.num_max[slots] - 1, table.num_ahead[slots])
    ops: list[Op] = []
    for sequence, needed, most, ahead in zip(wanting, *(count.tolist() for count in counts), strict=True):
        lease = sequence.lease
        if lease.awaits_verdict:
            worker.wants_blocks[sequence.sequence_id] = sequence
            continue
        if lease.extend_asked or needed <= lease.reserved_tokens:
            continue
        stall = worker.stalled.get(sequence.sequence_id)
        if stall is not None and stall.retry_ns > now_ns:
            continue
        if stall is not None:
            stall.refused = False
        # Several blocks at a time cost no more to ask for than one; but none too many once blocks were refused.
        more = life.settings.extend_more_blocks * lease.block_size if ahead else 0
        ops.append(life.leases.extend(lease, min(most, needed + more)))
    return ops
