"""Server-sent events: an ASGI response that stops its source when the client goes away.

data: {...}\\n\\n   ...   data: [DONE]\\n\\n          all went well
data: {...}\\n\\n   ...   data: {"error": ...}\\n\\n  it did not; nothing follows, [DONE] least of all
\\n\\n                                               no event: nothing came for some seconds
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
# Proxies and clients close connections on which nothing comes. Empty lines are between events anyway, so every client
# skips them; comments, which the format has for this, some take for data, or for the beginning of what comes next.
KEEP_ALIVE = b"\n\n"
KEEP_ALIVE_EVERY_S = 5.0
# Some clients end a line at these, too.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
T = TypeVar("T")


def event(body: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json_line(body) + b"\n\n"


def json_line(value: Any) -> bytes:
    """JSON escapes line ends, so it is one line."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    return text.encode("utf-8", "replace")


def named_event(body: dict[str, Any]) -> bytes:
    """One event whose name is the type of its data."""
    return b"event: " + str(body["type"]).encode() + b"\n" + event(body)


class EventStream(Response):
    """Sends `opening`, then events as they come, and empty lines while none do.

    `events` is closed in every case; its own errors must be events by then.
    """

    media_type = "text/event-stream"

    def __init__(self, opening: bytes, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(status_code=200, headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._opening = opening
        self._events = events
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, lambda: self._send_all(send))

    async def _send_all(self, send: Send) -> bool:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self._opening:
                await send({"type": "http.response.body", "body": self._opening, "more_body": True})
            self._sent_s = asyncio.get_running_loop().time()
            keeping_alive = asyncio.create_task(self._keep_alive(send))
            try:
                async for data in events:
                    self._sent_s = asyncio.get_running_loop().time()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            finally:
                keeping_alive.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True

    async def _keep_alive(self, send: Send) -> None:
        """One task for a stream: a timer for each event would cost more than the event."""
        loop = asyncio.get_running_loop()
        while True:
            left_s = self._sent_s + KEEP_ALIVE_EVERY_S - loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            self._sent_s = loop.time()
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


async def unless_disconnected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T | None:
    """Run `work`; cancel it and wait for its end when the client goes away first (then the answer is None).

    The request's body must have been read: what `receive` gives next is the disconnect.
    """

    async def run() -> T:
        return await work()

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.create_task(run())
    watching = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return None
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
