"""One answer of a server as it arrives: moments and counts, and no JSON read while the clock runs.

payload: data: {...}\\n\\n  data: {...}\\n\\n  data: {... usage}\\n\\n  data: [DONE]\\n\\n
         first_s ^        last_s ^          usage ^            is_done ^
"""

from __future__ import annotations

import json
import re
from typing import Any

BODY_BYTES_MAX = 16 * 1024 * 1024
_HAS_TEXT = re.compile(rb'"(?:text|content|reasoning_content)":\s?"[^"]')
_NO_CHOICES = re.compile(rb'"choices":\s?\[\]')
_USAGE = re.compile(rb'"usage":\s?\{')
_ERROR = re.compile(rb'data:\s?\{\s?"(?:error"|object":\s?"error")')
_MESSAGE_CHARS = 200


class Answer:
    """Filled by a connection. Moments in seconds of one monotonic clock, 0.0 where nothing came."""

    __slots__ = (
        *("_body", "_first_event_s", "_first_text_s", "_kept", "_rest", "_usage", "end_s", "failure", "headers"),
        *("is_done", "is_stream", "last_s", "status"),
    )

    def __init__(self, *, keeps_text: bool = False) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}  # names in small letters
        self.is_stream = False
        self.is_done = False
        self.last_s = self.end_s = 0.0
        self.failure = ""  # what went wrong below HTTP or in the stream; empty when nothing did
        self._first_text_s = self._first_event_s = 0.0
        self._kept: list[bytes] | None = [] if keeps_text else None
        self._usage = self._rest = b""
        self._body = bytearray()

    @property
    def first_s(self) -> float:
        """The first text; of an answer whose tokens have none, the first event."""
        return self._first_text_s or self._first_event_s

    def begin(self, status: int, content_type: bytes) -> None:
        self.status = status
        self.is_stream = status == 200 and content_type.startswith(b"text/event-stream")

    def payload(self, data: bytes, now_s: float) -> None:
        """The next bytes of the body, with any transfer coding taken off."""
        if not self.is_stream:
            self._body += data[: BODY_BYTES_MAX - len(self._body)]
            return
        text = self._rest + data
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        for event in events:
            self._event(event, now_s)

    def _event(self, event: bytes, now_s: float) -> None:
        if not event.startswith(b"data:"):
            return  # a comment, which keeps connections alive
        if _USAGE.search(event):
            self._usage = event
        if event.endswith(b"[DONE]"):
            self.is_done = True
        elif _ERROR.match(event):
            self.failure = f"error in the stream: {_message_of(event.partition(b':')[2])}"
        elif not _NO_CHOICES.search(event):
            self.last_s = now_s
            self._first_event_s = self._first_event_s or now_s
            if not self._first_text_s and _HAS_TEXT.search(event):
                self._first_text_s = now_s
            if self._kept is not None:
                self._kept.append(event)

    def usage(self) -> dict[str, Any]:
        """As the server reported it; empty when it did not."""
        if not self._usage:
            return {}
        found = json.loads(self._usage.partition(b":")[2])
        return dict(found.get("usage") or {})

    def text(self) -> str:
        """What was generated, of an answer that keeps it."""
        pieces = []
        for event in self.events():
            choice = event["choices"][0]
            pieces.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
        return "".join(pieces)

    def events(self) -> list[dict[str, Any]]:
        """Those with choices, of an answer that keeps its text."""
        assert self._kept is not None, "keeps_text was not asked for"
        return [json.loads(event.partition(b":")[2]) for event in self._kept]

    def json(self) -> dict[str, Any]:
        """The body of an answer that is no stream. Raises ValueError."""
        found = json.loads(bytes(self._body))
        if not isinstance(found, dict):
            raise ValueError("not an object")
        return found

    def message(self) -> str:
        """Why it failed, in the server's words where it has some."""
        return self.failure or (_message_of(bytes(self._body)) if self.status != 200 else "")


def _message_of(body: bytes) -> str:
    try:
        found = json.loads(body)
        error = found.get("error", found)
        return str(error["message"] if isinstance(error, dict) else error)[:_MESSAGE_CHARS]
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:_MESSAGE_CHARS].decode(errors="replace")
