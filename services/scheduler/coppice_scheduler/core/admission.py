"""Who may come in, who asks for memory next, and who waited too long."""

from __future__ import annotations

from functools import partial
from math import inf

from coppice.ids import LEASE_ID_BYTES, TOKEN_BYTES, DomainId, WorkerId
from coppice.messages.index import Acquire, Candidate, Op
from coppice_scheduler.core.leases import LeaseState
from coppice_scheduler.core.lifecycle import NS_PER_MS, Lifecycle
from coppice_scheduler.core.request import Finish, OutputError, OutputErrorCode, Refused, RefusedReason, Request
from coppice_scheduler.core.sequences import RequestState
from coppice_scheduler.core.standing import Standing
from coppice_scheduler.core.workers import Worker


def refusal(life: Lifecycle, request: Request, now_ns: int) -> Refused | None:
    """Why the request cannot be taken; None when it can."""
    settings = life.settings
    num_tokens = len(request.tokens) // TOKEN_BYTES
    if not num_tokens or request.max_new_tokens < 1:
        return Refused(RefusedReason.EMPTY, "there is nothing to do: the prompt or max_new_tokens is empty", 0)
    context = max_context(life)
    if num_tokens >= context:
        message = f"the prompt has {num_tokens} tokens; with one to generate it exceeds {context}"
        return Refused(RefusedReason.TOO_LONG, message, 0)
    pools = [worker.info.num_blocks * worker.info.block_size for worker in life.workers.values() if worker.info]
    if pools and num_tokens > max(pools):
        message = f"the prompt has {num_tokens} tokens; the largest worker holds {max(pools)}"
        return Refused(RefusedReason.NEVER_FITS, message, 0)
    limits = settings.limits_of(request.tenant)
    counts = life.counts
    waiting = counts.tenant_waiting[request.tenant]
    retry_ms = _retry_after_ms(life, now_ns)
    if waiting + counts.tenant_running[request.tenant] >= limits.max_concurrency:
        message = f"tenant {request.tenant} has {limits.max_concurrency} requests at work, its maximum"
        return Refused(RefusedReason.TENANT_CONCURRENCY, message, retry_ms)
    if counts.tenant_queued(request.tenant) >= limits.max_queued:
        message = f"tenant {request.tenant} has {limits.max_queued} requests waiting, its maximum"
        return Refused(RefusedReason.TENANT_QUEUE, message, retry_ms)
    if counts.waiting >= settings.max_queued or counts.waiting_tokens + num_tokens > settings.max_queued_tokens:
        message = f"{counts.waiting} requests with {counts.waiting_tokens} tokens are waiting, no more are taken"
        return Refused(RefusedReason.QUEUE_FULL, message, retry_ms)
    return None


def max_context(life: Lifecycle) -> int:
    """Tokens of the longest sequence: the own limit, or that of the roomiest worker that is listed."""
    infos = [worker.info for worker in life.workers.values() if worker.info]
    if not infos or any(not info.max_context for info in infos):
        return life.settings.max_context
    return min(life.settings.max_context, max(info.max_context for info in infos))


def _retry_after_ms(life: Lifecycle, now_ns: int) -> int:
    """As long as the head of the queue has waited so far: the best guess of how long a place takes."""
    oldest = life.queue.oldest()
    waited_ms = 0 if oldest is None else (now_ns - oldest.queued_ns) // NS_PER_MS
    return min(max(waited_ms, 100), life.settings.queue_timeout_ms)


def expire(life: Lifecycle, now_ns: int) -> None:
    """End what waited longer than the queue's timeout."""
    timeout_ns = life.settings.queue_timeout_ms * NS_PER_MS
    while (request := life.queue.oldest()) is not None and request.queued_ns + timeout_ns <= now_ns:
        waited_ms = (now_ns - request.queued_ns) // NS_PER_MS
        if request.domain_blocked:
            code = OutputErrorCode.TENANT_MAXIMUM
            why = f"domain {request.request.domain} held its maximum of blocks; send fewer requests at a time"
        else:
            code = OutputErrorCode.QUEUE_TIMEOUT
            why = "no worker had room; send it again later"
        error = OutputError(code, f"waited {waited_ms} ms in the queue: {why}", life.settings.queue_timeout_ms)
        life.finish(request, Finish.ERROR, now_ns, error=error)


def choose_acquires(life: Lifecycle, now_ns: int) -> list[Op]:
    """Acquires for the head of the line, as many as there are free places."""
    counts = life.counts
    places = life.settings.max_running - counts.running - counts.asking
    if places <= 0 or counts.waiting == counts.asking:
        return []
    workers = _candidates(life)
    if not workers:
        return []
    gate = life.gates.pool_gate()
    is_shut = gate is not None and not gate.opens(now_ns)
    standing = Standing(life)
    loads = _loads(life, workers)
    room = _room(life, workers)
    held_up: set[DomainId] = set()  # their heads find no worker now
    ops: list[Op] = []
    while places > 0:
        able = [worker for worker in workers if room[worker.worker_id] > 0]
        request = life.queue.pop_next(partial(_is_kept_out, life, able, standing, held_up, is_shut, now_ns))
        if request is None:
            break
        if _outgrows_all(life, request, now_ns):
            continue
        domain = request.request.domain
        covered = [worker for worker in able if standing.covers(worker, domain, request.num_tokens + 1)]
        candidates = [
            worker
            for worker in able
            if not worker.is_short(domain, past=worker in covered)
            and worker.has_context_for(request.num_tokens_max)
            and (worker in covered or not is_shut)
        ]
        if not candidates:
            held_up.add(domain)
            life.queue.put_back(request)
            continue
        past = all(worker in covered for worker in candidates)
        op = _acquire(life, request, candidates, loads, now_ns)
        life.leases.leases[op.lease_id].past_gate = past
        ops.append(op)
        for worker in candidates:
            room[worker.worker_id] -= 1
            standing.asked(worker, domain, op.reserve_tokens)
        life.gates.asked(domain, past=past)
        is_shut = is_shut or (gate is not None and not past)
        places -= 1
    return ops


def _outgrows_all(life: Lifecycle, request: RequestState, now_ns: int) -> bool:
    """Taken while no worker was listed, or a roomier one: it is cut to what there is. True: ended, nobody can go on."""
    context = max_context(life)
    if request.num_tokens_max <= context:
        return False
    if request.num_tokens < context:
        request.max_output_tokens = context - request.num_prompt_tokens
        return False
    message = f"{request.num_tokens} tokens and one to generate exceed the {context} that a worker takes"
    life.finish(request, Finish.ERROR, now_ns, error=OutputError(OutputErrorCode.NEVER_FITS, message))
    return True


def _room(life: Lifecycle, workers: list[Worker]) -> dict[WorkerId, float]:
    """Sequences that each worker can still take. An unanswered Acquire may end on any worker that it names."""
    room = {
        worker.worker_id: inf if worker.max_sequences is None else worker.max_sequences - len(worker.running)
        for worker in workers
    }
    if life.counts.asking and any(worker.max_sequences is not None for worker in workers):
        for lease in life.leases.leases.values():
            if lease.state is LeaseState.ASKED and lease.lease_id in life.by_lease:
                for worker_id in room.keys() & set(lease.candidates):
                    room[worker_id] -= 1
    return room


def _is_kept_out(
    life: Lifecycle,
    workers: list[Worker],
    standing: Standing,
    held_up: set[DomainId],
    is_shut: bool,
    now_ns: int,
    domain: DomainId,
) -> bool:
    if domain in held_up or life.gates.skips(domain, now_ns):
        return True
    for worker in workers:
        past = standing.covers(worker, domain, 1)
        if (past or not is_shut) and not worker.is_short(domain, past=past):
            return False
    return True


def _candidates(life: Lifecycle) -> list[Worker]:
    """Open workers of one namespace, that of the first of them by name, but for those that drain."""
    able = (worker for worker in life.workers.values() if worker.open and worker.info and not worker.info.draining)
    workers = sorted(able, key=lambda worker: worker.worker_id)
    namespaces = [worker.info.namespace for worker in workers if worker.info]
    return [worker for worker in workers if worker.info and worker.info.namespace == namespaces[0]]


def _loads(life: Lifecycle, workers: list[Worker]) -> dict[WorkerId, int]:
    """Prefill work per worker, with that of unanswered Acquires where they are expected to go."""
    loads = {worker.worker_id: worker.prefill_tokens() for worker in workers}
    if life.counts.asking:
        for lease in life.leases.leases.values():
            if lease.state is LeaseState.ASKED and lease.lease_id in life.by_lease and lease.expected_worker in loads:
                loads[lease.expected_worker] += lease.num_prefill_tokens
    return loads


def _acquire(
    life: Lifecycle, request: RequestState, workers: list[Worker], loads: dict[WorkerId, int], now_ns: int
) -> Acquire:
    info = workers[0].info
    assert info is not None
    lease = life.leases.open(request.request.domain, info.namespace, request.asked_under)
    assert len(lease.lease_id) == LEASE_ID_BYTES
    candidates = tuple(Candidate(worker.worker_id, loads[worker.worker_id]) for worker in workers)
    lease.candidates = tuple(worker.worker_id for worker in workers)
    lease.expected_worker = min(candidates, key=lambda candidate: candidate.load_cost).worker_id
    lease.num_prefill_tokens = request.num_tokens
    lease.reuse = request.request.reuse
    lease.retain_tokens = request.num_prompt_tokens if request.request.retain_ms else 0
    lease.retain_ms = request.request.retain_ms
    lease.reserve_asked = min(request.num_tokens + 1, request.num_kv_tokens_max)
    loads[lease.expected_worker] += request.num_tokens
    life.ask(request, lease, now_ns)
    return Acquire(
        lease_id=lease.lease_id,
        domain=lease.domain,
        namespace=lease.namespace,
        tokens=bytes(request.tokens),
        reserve_tokens=lease.reserve_asked,
        candidates=candidates,
        traceparent=request.request.traceparent,
        reuse=request.request.reuse,
        may_wait=_may_wait(life, request, now_ns),
        skip_match=request.request.sampling.prompt_logprobs and not request.num_output_tokens,
    )


def _may_wait(life: Lifecycle, request: RequestState, now_ns: int) -> bool:
    """For another's prefill: until the first wait of this stay in the queue has lasted for `single_flight_wait_ms`."""
    if not request.flight_until_ns:
        return life.settings.single_flight_wait_ms > 0
    return now_ns < request.flight_until_ns
