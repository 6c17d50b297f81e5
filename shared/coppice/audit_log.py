"""The audit log: one JSON line for each act of an operator, whatever it came by.

    call begins --> Act --note()--> facts --ended()--> {"time": ..., "verb": ..., "by": ..., "result": ...}

A line has names, numbers and outcomes. Prompts, tokens and keys never go into it: who notes a fact sees to that, and
what is not a name or a number has no form here. The file is opened anew for each line, so it may be moved away at any
time; acts are rare.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from coppice.errors import UsageError

NAME_CHARS_MAX = 256  # callers choose names; more is cut
NAMES_MAX = 1024  # of one list; `count` says how many there were
FILE_MODE = 0o600

Fact = str | int | bool | Sequence[str]

_log = logging.getLogger("coppice.audit")
_log.setLevel(logging.INFO)  # whatever level the service logs


class Act:
    """One act while it goes on. `by`: who asked, an identity or an address; `via`: REST, gRPC or a file."""

    def __init__(self, verb: str, by: str, via: str) -> None:
        self.verb = verb
        self.by = by
        self.via = via
        self.facts: dict[str, Fact] = {}

    def note(self, **facts: Fact) -> None:
        """Names and numbers: a domain, a count. Never what somebody sent to a model."""
        self.facts.update(facts)


class AuditLog:
    """Lines go to `path`, or to the service's log without one. Any thread may write.

    Raises UsageError when `path` cannot be written at the start. When it cannot be later, lines go to the log, and
    `problem` says so until one was written again.
    """

    def __init__(self, service: str, path: str | None = None) -> None:
        self._service = service
        self._path = path
        self.problem = ""
        if path is not None:
            try:
                _append(path, b"")
            except OSError as error:
                raise UsageError(
                    f"cannot write the audit log {path}: {error.strerror}", hint="give --audit-log another file"
                ) from error

    def ended(self, act: Act, *, done: bool, code: str = "") -> None:
        """Write the line of `act`. `code` is the status that its caller was answered with."""
        fields: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "service": self._service,
            "verb": act.verb,
            "by": _bounded(act.by),
            "via": act.via,
            **{name: _bounded(fact) for name, fact in act.facts.items()},
            "result": "done" if done else "refused",
            **({"code": code} if code else {}),
        }
        self._write(json.dumps(fields))

    def _write(self, line: str) -> None:
        if self._path is not None:
            try:
                _append(self._path, line.encode() + b"\n")
                self.problem = ""
                return
            except OSError as error:
                self.problem = f"the audit log {self._path} cannot be written: {error.strerror}"
                _log.error("%s; the line is here instead", self.problem)
        _log.info("%s", line)


def _append(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def _bounded(fact: Fact) -> Fact:
    if isinstance(fact, str):
        return fact[:NAME_CHARS_MAX]
    if isinstance(fact, int):
        return fact
    return [name[:NAME_CHARS_MAX] for name in fact[:NAMES_MAX]]
