"""Records <-> the messages of `cache.proto`, field by field: they have the same names.

Acquire(lease_id, ..., reuse=Reuse.LIKELY)    <--  lease_id, ..., reuse: REUSE_LIKELY
NoCapacity(lease_id, reason, retry_after_ms)  -->  lease_id, no_capacity: {reason, retry_after_ms}
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar, get_args, get_type_hints

from google.protobuf.message import Message

from coppice.messages.index import Answer
from coppice.messages.record import Record
from coppice_rpc.v1 import cache_pb2 as pb

RecordT = TypeVar("RecordT", bound=Record)
MessageT = TypeVar("MessageT", bound=Message)


class UnknownValue(ValueError):
    """A number that the enum does not have: the caller speaks a newer version."""


def record_from_wire(kind: type[RecordT], wire: Any) -> RecordT:
    """Raises UnknownValue."""
    hints = get_type_hints(kind)
    return kind(**{field.name: _value(hints[field.name], wire, field) for field in wire.DESCRIPTOR.fields})


def _value(hint: Any, wire: Any, field: Any) -> Any:
    value = getattr(wire, field.name)
    if field.enum_type is not None:
        named = {_wire_name(field.enum_type, member): member for member in hint}
        known = field.enum_type.values_by_number.get(value)
        if known is None or known.name not in named:
            raise UnknownValue(f"{field.name} has the unknown value {value}: the caller speaks a newer version")
        return named[known.name]
    if field.message_type is not None:
        return tuple(record_from_wire(get_args(hint)[0], each) for each in value)
    return value


def wire_from_record(kind: type[MessageT], record: Record) -> MessageT:
    """`kind` has no fields that the record has not."""
    return kind(**{field.name: _wire_value(getattr(record, field.name), field) for field in kind.DESCRIPTOR.fields})


def _wire_value(value: Any, field: Any) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values_by_name[_wire_name(field.enum_type, value)].number
    if field.message_type is not None:
        return [wire_from_record(getattr(pb, field.message_type.name), each) for each in value]
    return value


def answer_to_wire(answer: Answer) -> pb.Answer:
    kind = type(answer).__name__
    fields: Any = pb.Answer.DESCRIPTOR.oneofs[0].fields
    (name,) = (field.name for field in fields if field.message_type.name == kind)
    made: Any = {name: wire_from_record(getattr(pb, kind), answer)}
    return pb.Answer(lease_id=answer.lease_id, **made)


def _wire_name(kind: Any, member: Enum) -> str:
    """Names of an enum outside of messages stand in the file's scope, and so have a prefix."""
    return member.name if kind.containing_type is not None else f"{kind.name.upper()}_{member.name}"
