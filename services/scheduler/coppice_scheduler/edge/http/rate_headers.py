"""What is left of a tenant's limits per minute, on every answer to it, refusals too: clients pace themselves by it.

x-ratelimit-{limit,remaining,reset}-{requests,tokens}             as OpenAI has them; gRPC in trailing metadata
anthropic-ratelimit-{requests,tokens}-{limit,remaining,reset}     beside them on the routes of the Anthropic API
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coppice.tenants.tenant import Tenant
from coppice_scheduler.core.state.request import LimitLeft, TenantLimitsLeft

ALL_LIMITS = TenantLimitsLeft(LimitLeft(1, 1, 0), LimitLeft(1, 1, 0))  # of a tenant that has each
_SCOPE = "coppice.tenant"


def rate_headers(left: TenantLimitsLeft) -> dict[str, str]:
    """Of the limits that there are; `reset` is the time until all of a limit is left again."""
    headers = {}
    for kind, limit in _limits(left):
        headers[f"x-ratelimit-limit-{kind}"] = str(limit.limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(limit.left)
        headers[f"x-ratelimit-reset-{kind}"] = f"{limit.full_ms / 1000:g}s"
    return headers


def anthropic_rate_headers(left: TenantLimitsLeft, now_s: float) -> dict[str, str]:
    """The same; `reset` is a time in RFC 3339. `now_s`: seconds since 1970."""
    headers = {}
    for kind, limit in _limits(left):
        reset = datetime.fromtimestamp(-(-(now_s * 1000 + limit.full_ms) // 1000), UTC)
        headers[f"anthropic-ratelimit-{kind}-limit"] = str(limit.limit)
        headers[f"anthropic-ratelimit-{kind}-remaining"] = str(limit.left)
        headers[f"anthropic-ratelimit-{kind}-reset"] = f"{reset:%Y-%m-%dT%H:%M:%SZ}"
    return headers


def _limits(left: TenantLimitsLeft) -> Iterator[tuple[str, LimitLeft]]:
    for kind, limit in (("requests", left.requests), ("tokens", left.tokens)):
        if limit is not None:
            yield kind, limit


def answer_goes_to(tenant: Tenant, request: Request) -> None:
    """Called once it is known who asks."""
    request.scope[_SCOPE] = tenant


class RateHeaders:
    """ASGI. `anthropic_path`: what the paths of the Anthropic API begin with."""

    def __init__(self, app: ASGIApp, limits_left: Callable[[Tenant], TenantLimitsLeft], anthropic_path: str) -> None:
        self._app = app
        self._limits_left = limits_left
        self._anthropic_path = anthropic_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start" and _SCOPE in scope:
                told = [(name.encode(), value.encode()) for name, value in self._headers(scope).items()]
                message = {**message, "headers": [*message.get("headers", ()), *told]}
            await send(message)

        await self._app(scope, receive, send_with_limits)

    def _headers(self, scope: Scope) -> dict[str, str]:
        left = self._limits_left(scope[_SCOPE])
        headers = rate_headers(left)
        if scope["path"].startswith(self._anthropic_path):
            headers |= anthropic_rate_headers(left, time.time())
        return headers
