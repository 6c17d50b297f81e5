"""An id for every request, on every answer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coppice.telemetry.logs import REQUEST_ID
from coppice_scheduler.edge.base.request_id import HEADER, RequestId, request_id_of

_SCOPE = "coppice.request_id"
_NAME = HEADER.encode()
_ANTHROPIC_NAME = b"request-id"  # where clients of the Anthropic API look for it


class RequestIds:
    """ASGI. Around all that answers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value.decode("latin-1") for name, value in scope["headers"] if name == _NAME), None)
        request_id = scope[_SCOPE] = request_id_of(sent)
        REQUEST_ID.set(request_id.shown)  # each request is a task of its own

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                shown = request_id.shown.encode()
                headers = [*message.get("headers", ()), (_NAME, shown), (_ANTHROPIC_NAME, shown)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)


def id_of(request: Request) -> RequestId:
    found = request.scope[_SCOPE]
    assert isinstance(found, RequestId)
    return found
