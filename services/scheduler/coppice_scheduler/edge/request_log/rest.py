"""ASGI: a record for each request over REST, but for those that only look whether all is well."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coppice.telemetry.logs import REQUEST_ID
from coppice_scheduler.edge.base.errors import CLIENT_CLOSED_STATUS
from coppice_scheduler.edge.request_log.open_record import Log, OpenRecord, begin

UNRECORDED = frozenset({"/healthz", "/readyz", "/health", "/metrics", "/openapi.json"})
_SHOWN_CHARS = 100  # of a path that may be anything


class RequestRecords:
    def __init__(self, app: ASGIApp, log: Log) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNRECORDED or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        api = f"{scope['method']} {scope['path'][:_SHOWN_CHARS]}"
        record = begin(OpenRecord(self._log, api, REQUEST_ID.get(), client[0] if client else ""))
        status = CLIENT_CLOSED_STATUS

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            record.close(status)
