"""Who may come in, who asks for memory next, and who waited too long."""

from __future__ import annotations

from coppice.ids import TOKEN_BYTES
from coppice_scheduler.core.lifecycle import NS_PER_MS, Lifecycle
from coppice_scheduler.core.request import Finish, OutputError, OutputErrorCode, Refused, RefusedReason, Request


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
