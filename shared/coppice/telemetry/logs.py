"""Logs of a process: one line each on standard error. Prompts, tokens and completions never go into one."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

from coppice.errors import UsageError

LogLevel = str
LogFormat = Literal["text", "json"]
# Of the request that the present task serves; what is logged meanwhile says it.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
_LEVELS = ("debug", "info", "warning", "error")


class _OneLine(logging.Formatter):
    """`2026-01-31T12:00:00.123Z WARNING coppice.cache: text`; a traceback follows on lines of its own.

    Within a request: `... coppice.scheduler.http: [request 7f3a] text`.
    """

    def __init__(self) -> None:
        self.converter = time.gmtime
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (the standard library's name)
        request_id = REQUEST_ID.get()
        if request_id:
            record.message = f"[request {request_id}] {record.message}"
        record.message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return super().formatMessage(record)


class _Json(_OneLine):
    """`{"at":"2026-01-31T12:00:00.123Z","level":"warning","logger":"coppice.cache","message":"text"}`; with the id of
    the request that it is about as `request`, and a traceback as `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "at": f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            found["request"] = request_id
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False, separators=(",", ":"))


@contextmanager
def about_request(request_id: str) -> Iterator[None]:
    """What is logged within is about this request, and says so; the empty id is none."""
    token = REQUEST_ID.set(request_id)
    try:
        yield
    finally:
        REQUEST_ID.reset(token)


def configure_logging(level: LogLevel = "info", log_format: LogFormat = "text") -> None:
    """Send logs of this process to stderr, one line each. `level`: debug, info, warning or error."""
    if level not in _LEVELS:
        raise UsageError(f"log level {level!r} is not known", hint=f"one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _OneLine())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # The exporter logs each failed attempt with a stack; we say it once, and count.
    logging.getLogger("opentelemetry").setLevel("CRITICAL")
