"""Frames of the session protocol: a handshake, then numbered data and acknowledgements in both directions.

client                                   server
  | Hello(key, connection 1)               |
  |--------------------------------------->|   mints or recognises the session
  |            Welcome(incarnation, fresh) |
  |<---------------------------------------|
  | Data 1, Data 2 ...                     |   gapless per direction and session,
  |--------------------------------------->|   whatever happens to connections
  |               Data 1 (ack 2) ...       |
  |<---------------------------------------|
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

PROTOCOL_VERSION = 2
KEY_BYTES = 16

BodyT = TypeVar("BodyT")


@dataclass(frozen=True, slots=True)
class Hello:
    key: bytes  # 16 random bytes: one incarnation of the client
    connection: int  # 1, 2, 3 ...: a lower one than the newest is dead
    incarnation: int  # of the session that the client was attached to; 0 = none
    received: int  # highest number that the client received in that session
    epoch: int  # session epoch that the client holds; 0 = none
    name: str  # for people: worker id, scheduler name
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Welcome:
    connection: int
    incarnation: int  # of this session: never 0, and another one whenever the server opens it anew
    epoch: int  # the session's epoch from now on
    server_epoch: int  # cache epoch or worker epoch
    received: int  # highest number that the server received in this session
    fresh: bool  # True: both directions start again at 1, nothing sent before counts
    version: int = PROTOCOL_VERSION


class RejectCode(Enum):
    VERSION = "version"
    STALE_CONNECTION = "stale_connection"  # a newer connection of this session exists
    FENCED = "fenced"  # the epoch is dead here; get a new one
    NOT_READY = "not_ready"  # try again later
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Reject:
    code: RejectCode
    message: str


@dataclass(frozen=True, slots=True)
class Data(Generic[BodyT]):
    connection: int
    number: int
    ack: int
    body: BodyT


@dataclass(frozen=True, slots=True)
class Heartbeat:
    connection: int
    ack: int


Frame = Hello | Welcome | Reject | Data[BodyT] | Heartbeat
