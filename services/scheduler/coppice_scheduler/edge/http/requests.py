"""What is read of a request before it is understood: the key and the body, both bounded and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import Request
from fastapi.responses import Response

from coppice.tenants.tenant import Tenant
from coppice_scheduler.edge.base.auth import bearer_key
from coppice_scheduler.edge.base.errors import CLIENT_CLOSED_STATUS, ApiError, ErrorKind
from coppice_scheduler.edge.frontend.body_budget import Body
from coppice_scheduler.edge.frontend.frontdoor import FrontDoor
from coppice_scheduler.edge.frontend.generation_spec import MAX_BODY_BYTES
from coppice_scheduler.edge.frontend.loop_share import UNIT_BYTES, LoopShare
from coppice_scheduler.edge.http.rate_headers import answer_goes_to
from coppice_scheduler.edge.http.sse import unless_disconnected

KEY_HEADER = "x-api-key"  # where clients of the Anthropic API have it
READ = ["GET", "HEAD"]  # load balancers probe with HEAD


def caller_of(frontdoor: FrontDoor, request: Request) -> Tenant:
    """Who calls; the call counts as one of the tenant's. Raises ApiError."""
    key = bearer_key(request.headers.get("authorization", "")) or request.headers.get(KEY_HEADER, "").strip() or None
    tenant = frontdoor.tenant_of(key)
    answer_goes_to(tenant, request)
    frontdoor.count_call(tenant)
    return tenant


async def answer_to_body(
    frontdoor: FrontDoor,
    request: Request,
    timeout_s: float,
    answer: Callable[[Tenant, bytes], Awaitable[Response]],
) -> Response:
    """Of a route that needs no engine. Raises ApiError."""
    tenant = caller_of(frontdoor, request)
    with frontdoor.bodies.body(tenant) as body:
        await read_body(request, timeout_s, body, frontdoor.loop_share)
        response = await unless_disconnected(request.receive, lambda: answer(tenant, body.take_bytes()))
    return response if response is not None else Response(status_code=CLIENT_CLOSED_STATUS)


async def read_body(request: Request, timeout_s: float, body: Body, loop_share: LoopShare) -> None:
    """Put the whole body into `body`, bounded in bytes and time. Raises ApiError."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s) as timeout:
            async for part in request.stream():
                body.add(part)
                if body.num_bytes > MAX_BODY_BYTES:
                    raise _too_large()
                left_s = (timeout.when() or 0.0) - loop.time()
                timeout.reschedule(None)  # until the tenant has its turn, the client is not slow
                await loop_share.take(body.tenant, -(-len(part) // UNIT_BYTES))
                timeout.reschedule(loop.time() + left_s)
    except TimeoutError:
        raise ApiError(
            ErrorKind.TIMEOUT, f"The body did not arrive within {timeout_s:g} s.", code="request_timeout"
        ) from None


def _too_large() -> ApiError:
    return ApiError(ErrorKind.TOO_LARGE, f"The body is larger than {MAX_BODY_BYTES} bytes.", code="request_too_large")
