"""A limit on the bodies of requests, before anything parses them: one process serves REST beside everything else."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES_MAX = 16 << 20  # the longest prompt that is taken, 2^20 tokens of up to ten digits each, fits


class BodyLimit:
    """Middleware: a body with more than BODY_BYTES_MAX bytes ends in status 413, whether it says its length or not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > BODY_BYTES_MAX:
                raise HTTPException(413, f"the body has more than {BODY_BYTES_MAX} bytes")
            return message

        await self._app(scope, limited, send)
