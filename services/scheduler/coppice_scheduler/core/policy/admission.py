"""Who may come in, and who waited too long."""

from __future__ import annotations

from coppice.ids import TOKEN_BYTES, DomainId
from coppice.messages.index import NoCapacityReason, WorkerInfo
from coppice_scheduler.core.lifecycle import NS_PER_MS, Lifecycle
from coppice_scheduler.core.policy.queue_room import QueueRoom
from coppice_scheduler.core.queue.quarantine import words
from coppice_scheduler.core.state.forks import follows_at_work
from coppice_scheduler.core.state.request import (
    NOT_SERVED,
    Finish,
    OutputError,
    OutputErrorCode,
    Refused,
    RefusedReason,
    Request,
)
from coppice_scheduler.core.state.request_bounds import out_of_bounds
from coppice_scheduler.core.state.sequences import RequestState

RETRY_AFTER_MS_MIN = 100
STRICT_RETRY_AFTER_MS = 1000  # an estimate would tell of the other tenants


def refusal(life: Lifecycle, room: QueueRoom, request: Request, now_ns: int) -> Refused | None:
    """Why the request cannot be taken; None when it can."""
    field = out_of_bounds(request)
    if field:
        return Refused(
            RefusedReason.INTERNAL,
            f"the request has a {field} that cannot be planned; it was refused before anything was done with it",
            0,
        )
    if not life.settings.serves(request.tenant, request.domain):
        return Refused(RefusedReason.TENANT_REMOVED, NOT_SERVED, 0)
    if request.num_places:
        if request.resumed is not None:
            return None
        return _beyond_concurrency(life, request.tenant, request.num_places, 0)
    num_tokens = len(request.tokens) // TOKEN_BYTES
    if not num_tokens or request.max_new_tokens < 1:
        return Refused(RefusedReason.EMPTY, "there is nothing to do: the prompt or max_new_tokens is empty", 0)
    why_not = (
        _never(life, request, num_tokens + _num_sent(request))
        or _in_quarantine(life, request, now_ns)
        or _without_call(life, request)
    )
    if why_not is not None or request.resumed is not None:  # of what was taken once nothing is refused for want of room
        return why_not
    return _without_room(life, room, request, num_tokens, now_ns) or _too_late(life, request, num_tokens, now_ns)


def _num_sent(request: Request) -> int:
    """Output tokens of another planner's."""
    return 0 if request.resumed is None else len(request.resumed.sent) // TOKEN_BYTES


def _without_call(life: Lifecycle, request: Request) -> Refused | None:
    if request.step_of is None:
        return None
    call = life.open_calls.find(request.step_of)
    if call is None:
        return Refused(RefusedReason.CALL_ENDED, "the call that this was a step of has ended", 0)
    if call.num_steps >= call.request.num_places:
        message = f"a call with {call.request.num_places} places has as many steps at work; this is a fault of ours"
        return Refused(RefusedReason.INTERNAL, message, 0)
    return None


def _without_room(life: Lifecycle, room: QueueRoom, request: Request, num_tokens: int, now_ns: int) -> Refused | None:
    """The places of a call's steps were given to it as a whole; what came in with its first goes on."""
    has_place = request.step_of is not None
    if has_place and request.fork_of is not None:
        return None
    return (
        (None if has_place else _beyond_concurrency(life, request.tenant, request.num_to_come, num_tokens))
        or _beyond_line(life, request.tenant, num_tokens)
        or _beyond_rate(life, request, num_tokens, now_ns)
        or _beyond_queue(life, room, request.tenant, num_tokens)
    )


def _never(life: Lifecycle, request: Request, num_tokens: int) -> Refused | None:
    """What no wait can help."""
    context = max_context(life)
    if num_tokens >= context:
        message = f"the prompt has {num_tokens} tokens; with one to generate it exceeds {context}"
        return Refused(RefusedReason.TOO_LONG, message, 0)
    infos = [worker.info for worker in life.workers.values() if worker.info]
    largest = max((info.num_blocks * info.block_size for info in infos), default=num_tokens)
    if num_tokens > largest:
        message = f"the prompt has {num_tokens} tokens; the largest worker holds {largest}"
        return Refused(RefusedReason.NEVER_FITS, message, 0)
    largest = max((tokens_held_max(life, request.domain, info) for info in infos), default=num_tokens)
    if num_tokens > largest:
        message = f"the prompt has {num_tokens} tokens; domain {request.domain} may hold {largest} on one worker"
        return Refused(RefusedReason.NEVER_FITS, message, 0)
    return None


def tokens_held_max(life: Lifecycle, domain: DomainId, info: WorkerInfo) -> int:
    """What a domain may ever hold on one worker."""
    maximum = life.settings.maximums.get(domain)
    return (info.num_blocks if maximum is None else maximum.of(info.num_blocks)) * info.block_size


def _in_quarantine(life: Lifecycle, request: Request, now_ns: int) -> Refused | None:
    left_ms = life.quarantine.left_ms(request, now_ns)
    return Refused(RefusedReason.QUARANTINED, words(left_ms), left_ms) if left_ms else None


def _beyond_concurrency(life: Lifecycle, tenant: str, num_places: int, num_tokens: int) -> Refused | None:
    """`num_places`: how many more requests are to be at work at once, in the whole cell."""
    limits, counts = life.settings.limits_of(tenant), life.counts
    num_at_work = counts.tenant_waiting[tenant] + counts.tenant_running[tenant] + life.open_calls.num_spare(tenant)
    num_at_work += life.elsewhere.num_at_work(life.shares.find(tenant))
    if num_at_work + num_places <= limits.max_concurrency:
        return None
    message = f"tenant {tenant} has {num_at_work} requests at work, its maximum is {limits.max_concurrency}"
    if num_places > 1:
        message += f", and this call needs {num_places} places"
    next_end_ms = int(life.recent.duration_ns(tenant) / max(num_at_work, 1) / NS_PER_MS)
    retry_after_ms = _retry_after_ms(life, tenant, num_tokens, measured_ms=next_end_ms)
    return Refused(RefusedReason.TENANT_CONCURRENCY, message, retry_after_ms)


def _beyond_line(life: Lifecycle, tenant: str, num_tokens: int) -> Refused | None:
    limits, counts = life.settings.limits_of(tenant), life.counts
    if counts.tenant_queued(tenant) >= limits.max_queued:
        message = f"tenant {tenant} has {limits.max_queued} requests waiting, its maximum"
        return Refused(RefusedReason.TENANT_QUEUE, message, _retry_after_ms(life, tenant, num_tokens))
    return None


def _beyond_rate(life: Lifecycle, request: Request, num_tokens: int, now_ns: int) -> Refused | None:
    if request.fork_of is not None:
        return None  # one with the request that it forks; that was counted
    wait_ms, limit = life.rate_limits.wait_ms(request.tenant, num_tokens, now_ns)
    if not wait_ms:
        return None
    return Refused(RefusedReason.TENANT_RATE, f"tenant {request.tenant} has used up its {limit}", wait_ms)


def _beyond_queue(life: Lifecycle, room: QueueRoom, tenant: str, num_tokens: int) -> Refused | None:
    """The message names no number: what waits is mostly that of others. The edge logs it for the operator."""
    if room.has_room(tenant, num_tokens, life.counts):
        return None
    message = "the queue has no more room for this tenant's requests now; send it again later"
    return Refused(RefusedReason.QUEUE_FULL, message, _retry_after_ms(life, tenant, num_tokens))


def _too_late(life: Lifecycle, request: Request, num_tokens: int, now_ns: int) -> Refused | None:
    if request.deadline_ns is None:
        return None
    left_ms = (request.deadline_ns - now_ns) // NS_PER_MS
    # Behind nobody it waits for nothing; and where places are free, what was measured does not tell what can be done.
    is_estimated = not life.settings.limits_of(request.tenant).is_strict and life.counts.tenant_queued(request.tenant)
    needed_ms = estimated_wait_ms(life, request.tenant, num_tokens) if is_estimated else 0
    if left_ms > 0 and needed_ms <= left_ms:
        return None
    message = f"the request has {max(left_ms, 0)} ms left; its turn comes in about {needed_ms} ms"
    return Refused(RefusedReason.DEADLINE, message, needed_ms)


def max_context(life: Lifecycle) -> int:
    """Tokens of the longest sequence: the own limit, or that of the roomiest worker that is listed."""
    longest = 0
    for worker in life.workers.values():
        if worker.info is not None:
            if not worker.info.max_context:
                return life.settings.max_context
            longest = max(longest, worker.info.max_context)
    return min(life.settings.max_context, longest or life.settings.max_context)


def estimated_wait_ms(life: Lifecycle, tenant: str, num_tokens: int) -> int:
    """Until a prompt of so many tokens, at the end of its tenant's line, is computed. 0: nothing was measured yet."""
    tokens_per_s = sum(worker.rate.tokens_per_s for worker in life.workers.values() if worker.usable)
    if not tokens_per_s:
        return 0
    counts = life.counts
    weight_of = {name: life.settings.limits_of(name).weight for name in {*counts.at_work(), tenant}}
    share = weight_of[tenant] / sum(weight_of.values())
    outputs = life.recent.num_tokens(tenant) * counts.tenant_waiting[tenant]
    ahead = counts.tenant_waiting_tokens[tenant] + outputs + num_tokens
    return int(ahead / (tokens_per_s * share) * 1000)


def _retry_after_ms(life: Lifecycle, tenant: str, num_tokens: int, measured_ms: int = 0) -> int:
    """`measured_ms` counts in place of the estimate for its line; 0: nothing was measured yet."""
    if life.settings.limits_of(tenant).is_strict:
        return min(STRICT_RETRY_AFTER_MS, life.settings.queue_timeout_ms)
    wait_ms = measured_ms or estimated_wait_ms(life, tenant, num_tokens)
    return min(max(wait_ms, RETRY_AFTER_MS_MIN), life.settings.queue_timeout_ms)


def expire(life: Lifecycle, now_ns: int) -> None:
    """End what is past its own deadline, and what waited longer than the queue's timeout. A fork does not wait in vain
    while its leader computes the prompt."""
    while (request := life.deadlines.due(now_ns)) is not None:
        where = "running" if request.sequence is not None else "waiting"
        error = OutputError(OutputErrorCode.DEADLINE, f"the request's deadline passed while it was {where}")
        life.finish(request, Finish.ERROR, now_ns, error=error)
    timeout_ns = life.settings.queue_timeout_ms * NS_PER_MS
    while (request := life.queue.oldest()) is not None and request.queued_ns + timeout_ns <= now_ns:
        if follows_at_work(request):
            life.queue.stay_on(request, now_ns)
            continue
        waited_ms = (now_ns - request.queued_ns) // NS_PER_MS
        code, why = _why_it_waited(request)
        error = OutputError(code, f"waited {waited_ms} ms in the queue: {why}", life.settings.queue_timeout_ms)
        life.finish(request, Finish.ERROR, now_ns, error=error)


def _why_it_waited(request: RequestState) -> tuple[OutputErrorCode, str]:
    domain = request.request.domain
    if request.no_room is NoCapacityReason.DOMAIN_MAXIMUM:
        why = f"domain {domain} held its maximum of blocks; send fewer requests at a time"
        return OutputErrorCode.TENANT_MAXIMUM, why
    if request.no_room is NoCapacityReason.DOMAIN_UNKNOWN:
        why = f"the cache service does not know domain {domain} yet; send it again later, or tell the operator"
        return OutputErrorCode.TENANT_NOT_READY, why
    return OutputErrorCode.QUEUE_TIMEOUT, "no worker had room; send it again later"
