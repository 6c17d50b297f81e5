"""`x-ratelimit-*` as OpenAI has them: clients and gateways pace themselves by them."""

from __future__ import annotations

from coppice_scheduler.core.state.request import LimitLeft, TenantLimitsLeft

ALL_LIMITS = TenantLimitsLeft(LimitLeft(1, 1, 0), LimitLeft(1, 1, 0))  # of a tenant that has each


def rate_headers(left: TenantLimitsLeft) -> dict[str, str]:
    """Of the limits that there are; `reset` is the time until all of a limit is left again."""
    headers = {}
    for kind, limit in (("requests", left.requests), ("tokens", left.tokens)):
        if limit is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(limit.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(limit.left)
            headers[f"x-ratelimit-reset-{kind}"] = f"{limit.full_ms / 1000:g}s"
    return headers
