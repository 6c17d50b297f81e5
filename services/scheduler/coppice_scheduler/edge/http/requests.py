"""What is read of a request before it is understood: the key and the body, both bounded."""

from __future__ import annotations

import asyncio

from fastapi import Request

from coppice_scheduler.edge.base.auth import bearer_key
from coppice_scheduler.edge.base.errors import ApiError, ErrorKind
from coppice_scheduler.edge.frontend.generation_spec import MAX_BODY_BYTES


def bearer_of(request: Request) -> str | None:
    return bearer_key(request.headers.get("authorization", ""))


async def read_body(request: Request, timeout_s: float) -> bytes:
    """The whole body, bounded in bytes and time. Raises ApiError."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise ApiError(
            ErrorKind.TIMEOUT, f"The body did not arrive within {timeout_s:g} s.", code="request_timeout"
        ) from None
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(ErrorKind.TOO_LARGE, f"The body is larger than {MAX_BODY_BYTES} bytes.", code="request_too_large")
