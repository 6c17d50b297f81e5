"""Requests per minute at the door: every call of a key counts, whatever becomes of it.

The planner counts what it takes, exactly and for all front doors together. It never hears of calls that end here:
`/tokenize`, lists of models, refusals. Each front door counts those with a bucket of its own, by the planner's rules.
A call takes from the bucket before anything of it is read, so a generation that the planner would take finds enough
here: the planner takes from its bucket for the same call, and not earlier.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.queue.limits import Bucket
from coppice_scheduler.core.state.request import LimitLeft, RefusedReason
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind

_NS_PER_MS = 1_000_000


class DoorLimits:
    """Of one front door. `clock_ns` is monotonic."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._buckets: dict[str, Bucket] = {}

    def left(self, tenant: Tenant) -> LimitLeft | None:
        """Of its requests per minute, as this front door counted them; None: it has no limit, or none came yet."""
        bucket = self._buckets.get(tenant.id)
        if bucket is None or not tenant.requests_per_minute:
            return None
        bucket.refill(self._clock_ns())
        return bucket.left()

    def count(self, tenant: Tenant) -> None:
        """A call of the tenant has come. Raises ApiError (BUSY) with the time until one more is taken."""
        per_minute = tenant.requests_per_minute
        if not per_minute:
            return
        now_ns = self._clock_ns()
        bucket = self._buckets.get(tenant.id)
        if bucket is None or bucket.per_minute != per_minute:
            bucket = self._buckets[tenant.id] = Bucket.full(per_minute, now_ns)
        bucket.refill(now_ns)
        wait_ns = bucket.wait_ns(1)
        if wait_ns:
            raise ApiError(
                ErrorKind.BUSY,
                f"tenant {tenant.id} has used up its {per_minute} requests per minute",
                code=RefusedReason.TENANT_RATE.value,
                retry_after_ms=-(-wait_ns // _NS_PER_MS),
            )
        bucket.level -= 1
