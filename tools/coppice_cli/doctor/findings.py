"""What a check says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    OK = "ok"
    WARN = "warn"  # it runs, with less than it could have
    FAIL = "fail"  # something will not run


@dataclass(frozen=True, slots=True)
class Finding:
    """`what` is so at `subject`; `to_do` is empty where nothing is."""

    state: State
    subject: str
    what: str
    to_do: str = ""


def ok(subject: str, what: str) -> Finding:
    return Finding(State.OK, subject, what)


def warn(subject: str, what: str, to_do: str) -> Finding:
    return Finding(State.WARN, subject, what, to_do)


def fail(subject: str, what: str, to_do: str) -> Finding:
    return Finding(State.FAIL, subject, what, to_do)


def worst(findings: Sequence[Finding]) -> State:
    found = {finding.state for finding in findings}
    return next((state for state in (State.FAIL, State.WARN) if state in found), State.OK)
