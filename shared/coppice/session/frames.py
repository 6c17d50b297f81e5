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

from enum import Enum
from typing import Generic, TypeVar

from coppice.ids import U32, U64
from coppice.messages.record import Message
from coppice.session.versions import PROTOCOL_VERSION, Versions

KEY_BYTES = 16

BodyT = TypeVar("BodyT")


class Hello(Message, frozen=True):
    key: bytes  # 16 random bytes: one incarnation of the client
    connection: U64  # 1, 2, 3 ...: a lower one than the newest is dead
    incarnation: U64  # of the session that the client was attached to; 0 = none
    received: U64  # highest number that the client received in that session
    epoch: U64  # session epoch that the client holds; 0 = none
    name: str  # for people: worker id, scheduler name
    version: U32 = PROTOCOL_VERSION  # the lowest that the client speaks: builds before version 7 speak no other one
    voucher: bytes = b""  # for what is claimed here; see `vouchers`
    version_max: U32 = 0  # the highest that the client speaks; 0 = `version`

    @property
    def versions(self) -> Versions:
        return Versions(self.version, max(self.version, self.version_max))


class Welcome(Message, frozen=True):
    connection: U64
    incarnation: U64  # of this session: never 0, and another one whenever the server opens it anew
    epoch: U64  # the session's epoch from now on
    server_epoch: U64  # cache epoch or worker epoch
    received: U64  # highest number that the server received in this session
    fresh: bool  # True: both directions start again at 1, nothing sent before counts
    version: U32 = PROTOCOL_VERSION  # that both ends speak in this session
    voucher: bytes = b""  # to be shown in the next Hello; empty: the one that the client has stays


class RejectCode(Enum):
    VERSION = "version"
    STALE_CONNECTION = "stale_connection"  # a newer connection of this session exists
    FENCED = "fenced"  # the epoch is dead here; get a new one
    NOT_READY = "not_ready"  # try again later
    INVALID = "invalid"

    @classmethod
    def _missing_(cls, value: object) -> RejectCode:
        """A code that is younger than this reader: a refusal all the same."""
        return cls.INVALID


class Reject(Message, frozen=True):
    code: RejectCode
    message: str


class Data(Message, Generic[BodyT], frozen=True):
    connection: U64
    number: U64
    ack: U64
    body: BodyT


class Heartbeat(Message, frozen=True):
    connection: U64
    ack: U64


Frame = Hello | Welcome | Reject | Data[BodyT] | Heartbeat
