"""Messages between the planner's process and its front doors: length-prefixed msgpack frames on a Unix socket.

planner -> door   Start, then Standing (at changes, and a few times a second), Turn (one per turn), Stop
door -> planner   Serving or CannotServe, then Asks (one per turn of its loop), Beat (each second)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack

from coppice_scheduler.core.state.request import Finish, Output, Refused, Request, SchedulerStats, TokenBatch
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.ipc.records import RecordError, from_plain, to_plain

DOOR_SHIFT = 24  # a request's number names its door in the bits above
DOORS_MAX = 256  # at once, with those that died a moment ago
MAX_FRAME_BYTES = 512 * 1024 * 1024
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Start:
    """The first frame of a front door."""

    door: int
    settings: str  # ServiceSettings as JSON, ports as they are really
    model: ModelInfo
    metrics_dir: str


@dataclass(frozen=True, slots=True)
class Serving:
    """The listeners are open."""


@dataclass(frozen=True, slots=True)
class CannotServe:
    """Why a front door ends before it began, for a person."""

    exit_code: int
    what: str
    hint: str


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str
    finish: Finish  # CANCELLED, or STOP where a stop string was found


@dataclass(frozen=True, slots=True)
class Asks:
    """New requests, then cancels."""

    requests: tuple[Request, ...]
    cancels: tuple[Cancel, ...]


@dataclass(frozen=True, slots=True)
class Beat:
    """The door's loop turns."""


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    request_id: str
    refused: Refused


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn of the planner made for one front door."""

    refusals: tuple[RefusedRequest, ...]
    tokens: tuple[TokenBatch, ...]
    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class PlannerState:
    """How things are with the planner."""

    ready: bool
    accepts: bool
    stats: SchedulerStats


@dataclass(frozen=True, slots=True)
class Stop:
    """Serve what is there, take nothing new, end."""


ToDoor = Start | PlannerState | Turn | Stop
FromDoor = Serving | CannotServe | Asks | Beat
Message = ToDoor | FromDoor
_KINDS: tuple[type[Message], ...] = (Start, PlannerState, Turn, Stop, Serving, CannotServe, Asks, Beat)
_KIND_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


class FrameError(Exception):
    """What came over the socket is no message."""


def to_frame(message: Message) -> bytes:
    body: bytes = msgpack.packb([_KIND_NUMBERS[type(message)], to_plain(message)])
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Bytes in, messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now. Raises FrameError; then the connection is of no use any more."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are taken")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield _message(body)


def _message(body: bytes) -> Message:
    try:
        plain: Any = msgpack.unpackb(body)
        if type(plain) is not list or len(plain) != 2:
            raise FrameError("a frame is [kind, fields]")
        kind, fields = plain
        if type(kind) is not int or not 0 <= kind < len(_KINDS):
            raise FrameError("a frame of an unknown kind")
        return from_plain(_KINDS[kind], fields)
    except RecordError as error:
        raise FrameError(str(error)) from None
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FrameError(f"no msgpack: {error!r}") from None
