"""Values that serialise themselves: what every message between processes is made of.

    class Extend(Message, frozen=True):          ["Extend", lease_id, reserve_tokens]
        lease_id: LeaseId
        reserve_tokens: U64

A record is an array of its fields in their order; a message has its class's name before them. The annotations are all
there is to write: `coppice.edge.codec` encodes by them and refuses what does not fit. A reader takes further fields at
the end of a record, and does without those that have a default: such a field needs no new protocol version.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

ITEM_BYTES = "item_bytes"  # the length of a packed field is a multiple of what its annotation says under this name

PackedU32 = Annotated[bytes, Meta(extra={ITEM_BYTES: 4})]  # token ids, sequence ids, counts; all little endian
PackedF32 = Annotated[bytes, Meta(extra={ITEM_BYTES: 4})]
PackedPairs = Annotated[bytes, Meta(extra={ITEM_BYTES: 8})]  # a u32 and an f32
PackedHandles = Annotated[bytes, Meta(extra={ITEM_BYTES: 8})]
PackedGenerations = Annotated[bytes, Meta(extra={ITEM_BYTES: 8})]
PackedSeals = Annotated[bytes, Meta(extra={ITEM_BYTES: 16})]


class Record(Struct, frozen=True, array_like=True):
    """A part of messages. Values are checked where a message is decoded, not where it is made."""


class Message(Record, frozen=True, tag=True):
    """A record that stands beside others where it is read, told apart by its name."""

    SINCE: ClassVar[int] = 0  # first protocol version (`coppice.session.versions`) that has it; 0 = all that are spoken
