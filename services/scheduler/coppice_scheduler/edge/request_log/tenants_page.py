"""What an operator may ask of tenants, on the port of the metrics: who has how much at work, against which limits.

GET /tenants?limit=200      {"num_tenants": 3, "tenants": [those with most at work first]}
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import parse_qs

from coppice.telemetry.metrics_server import Page
from coppice.tenants.directory import TenantDirectory
from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import LimitLeft, SchedulerStats, TenantLimitsLeft, TenantStats
from coppice_scheduler.edge.request_log.budgets import Budgets
from coppice_scheduler.edge.request_log.pages import json_page, limit_of

TENANTS_MAX = 1000
_NOTHING, _UNTOUCHED = TenantStats(0, 0), TenantLimitsLeft(None, None)


class TenantsPage:
    """Any thread may call it."""

    def __init__(
        self, directory: Callable[[], TenantDirectory], stats: Callable[[], SchedulerStats], request_log: str | None
    ) -> None:
        """`request_log`: where the tokens of a month are counted from; None: there are no budgets."""
        self._directory = directory
        self._stats = stats
        self._budgets = Budgets(request_log)
        self._counting = threading.Lock()

    def __call__(self, path: str, query: str) -> Page | None:
        """None: another path."""
        if path != "/tenants":
            return None
        limit = limit_of(parse_qs(query), 200, TENANTS_MAX)
        return self._listed(limit) if isinstance(limit, int) else limit

    def _listed(self, limit: int) -> Page:
        stats, tenants = self._stats(), self._directory().tenants

        def order(tenant: Tenant) -> tuple[int, str]:
            at_work = stats.tenants.get(tenant.id, _NOTHING)
            return -at_work.running - at_work.waiting, tenant.id

        shown = sorted(tenants, key=order)[:limit]
        if any(tenant.has_budget for tenant in shown):
            self._count()
        return json_page(200, {"num_tenants": len(tenants), "tenants": [self._told(one, stats) for one in shown]})

    def _count(self) -> None:
        """What is not counted yet of the month, unless another thread is at it."""
        if self._counting.acquire(blocking=False):
            try:
                self._budgets.want()
                self._budgets.refresh(datetime.now(UTC))
            finally:
                self._counting.release()

    def _told(self, tenant: Tenant, stats: SchedulerStats) -> dict[str, object]:
        """Of limits 0 is none; `left` of a minute's limits is null where there is none, or nothing was sent yet."""
        at_work = stats.tenants.get(tenant.id, _NOTHING)
        left = stats.limits_left.get(tenant.id, _UNTOUCHED)
        return {
            "tenant": tenant.id,
            "domain": tenant.domain,
            "running": at_work.running,
            "waiting": at_work.waiting,
            "concurrency": tenant.concurrency,
            "max_queued": tenant.max_queued,
            "weight": tenant.weight,
            "requests_per_minute": tenant.requests_per_minute,
            "requests_left": _left(left.requests),
            "tokens_per_minute": tenant.tokens_per_minute,
            "tokens_left": _left(left.tokens),
            "tokens_per_month": tenant.tokens_per_month,
            "soft_tokens_per_month": tenant.soft_tokens_per_month,
            "tokens_of_month": self._budgets.used(tenant.id) if tenant.has_budget else None,
        }


def _left(limit: LimitLeft | None) -> int | None:
    return None if limit is None else limit.left
