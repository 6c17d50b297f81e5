"""Builds of the version before beside those of ours: what they say to each other, and which process is of which.

    a process    speaks          says                                hears
    ours         N-1 and N       to N-1: no later message or field   later fields have their defaults
    before       N-1             no later message or field           never a later message, as nobody may say one

A process changes its build with a restart: it is upgraded, or rolled back.
"""

from __future__ import annotations

from random import Random
from typing import Any

from msgspec.structs import replace

from coppice.messages.index import Acquire, OpBatch, Release, WorkerInfo, Workers
from coppice.messages.record import Message, Record
from coppice.messages.registration import CopiesDone, FenceAck, Register, Registered
from coppice.messages.reuse import Outcome
from coppice.messages.step import SequenceStart, StepPlan
from coppice.session.versions import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, SPOKEN, Versions

BEFORE = Versions(PROTOCOL_VERSION_MIN, PROTOCOL_VERSION_MIN)
OLDER_SHARE = 0.5  # of the processes of a cell that is being upgraded, at first
# What the version before does not have, with its defaults.
LATER_FIELDS: dict[type[Record], dict[str, Any]] = {
    Register: {
        "knows_owners": False,
        "num_disk_blocks": 0,
        "disk_generations": b"",
        "disk_seals": b"",
        "disk_epoch": 0,
    },
    FenceAck: {"disk_generations": b"", "disk_seals": b""},
    Registered: {"owner": 0, "keeps_disk": False},
    WorkerInfo: {"is_owned": True, "yields": False},
    Acquire: {"call_kind": 0},
    Release: {"outcome": Outcome.UNKNOWN},
    CopiesDone: {"prefill_ns_per_token": 0, "copy_ns_per_block": 0, "disk_ns_per_block": 0, "lost_from": ()},
    SequenceStart: {"copy_source": b"", "copy_seal": b""},
}
# Messages that have such records within: in which field.
_INNER: dict[type[Record], str] = {Workers: "workers", StepPlan: "attach", OpBatch: "ops"}


def since(body: Any) -> int:
    """The first version that has it; what is no message is there in all."""
    return body.SINCE if isinstance(body, Message) else 0


def may_say(body: Any, version: int) -> bool:
    """Whether a peer of this version knows the message."""
    return since(body) <= version


def as_said(body: Any, version: int) -> Any:
    """What arrives of it where both ends speak this version."""
    if version == PROTOCOL_VERSION:
        return body
    if type(body) in _INNER:
        name = _INNER[type(body)]
        return replace(body, **{name: tuple(map(_without_later_fields, getattr(body, name)))})
    return _without_later_fields(body)


def _without_later_fields(record: Any) -> Any:
    later = LATER_FIELDS.get(type(record))
    return record if later is None else replace(record, **later)


class Builds:
    """By name of a process; a process that starts again is of the same build. `mixed`: not all are ours."""

    def __init__(self, seed: int, *, mixed: bool) -> None:
        self._rng = Random(f"builds of {seed}")  # its own, so that runs without it are what they were
        self._mixed = mixed
        self._spoken: dict[str, Versions] = {}

    def of(self, name: str) -> Versions:
        if name not in self._spoken:
            self._spoken[name] = BEFORE if self._mixed and self._rng.random() < OLDER_SHARE else SPOKEN
        return self._spoken[name]

    def change(self, name: str) -> bool:
        """It is of the other build when it starts next; whether that is ours."""
        is_upgraded = self.of(name) == BEFORE
        self._spoken[name] = SPOKEN if is_upgraded else BEFORE
        return is_upgraded

    @property
    def are_ours(self) -> bool:
        return all(spoken == SPOKEN for spoken in self._spoken.values())
