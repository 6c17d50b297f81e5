"""What the operator hears when the queue is full: clients are told no numbers, since these are mostly of others."""

from __future__ import annotations

import logging

from coppice.telemetry.logs import about_request
from coppice_scheduler.core.state.request import Refused, RefusedReason, Request, SchedulerStats

_log = logging.getLogger("coppice.scheduler")
EVERY_NS = 10_000_000_000  # at most one line in this time, however much is refused


class RefusalLog:
    """Touched in the planner's turns only."""

    def __init__(self) -> None:
        self._next_ns = 0
        self._num_unsaid = 0

    def refused(self, request: Request, refused: Refused, stats: SchedulerStats, now_ns: int) -> None:
        """`stats` may be a little old."""
        if refused.reason is not RefusedReason.QUEUE_FULL:
            return
        self._num_unsaid += 1
        if now_ns < self._next_ns:
            return
        with about_request(request.request_id):
            self._say(request.tenant, stats)
        self._next_ns = now_ns + EVERY_NS
        self._num_unsaid = 0

    def _say(self, tenant: str, stats: SchedulerStats) -> None:
        _log.warning(
            "the queue is full for tenant %s: %d requests with %d tokens wait, %d are the tenant's; %d refused since "
            "the last such line; see --max-queued, --max-queued-tokens and the tenants' weights",
            tenant,
            stats.waiting,
            stats.waiting_tokens,
            stats.tenants[tenant].waiting if tenant in stats.tenants else 0,
            self._num_unsaid,
        )
