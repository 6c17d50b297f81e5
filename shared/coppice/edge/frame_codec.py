"""Frames of the session protocol <-> the protobuf frames of one edge.

Every edge has its own pair of frame messages (typed bodies), all with the same handshake and header fields. A codec
knows the two frame classes of its edge and, per body field, how to convert that body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from coppice.session.frames import Data, Frame, Heartbeat, Hello, Reject, RejectCode, Welcome
from coppice_rpc.v1 import session_pb2

_REJECT_TO_WIRE = {code: session_pb2.Reject.Code.Value(code.name) for code in RejectCode}
_REJECT_FROM_WIRE = {wire: code for code, wire in _REJECT_TO_WIRE.items()}


class MalformedFrame(ValueError):
    """Bytes that are no protobuf, or that say nothing that this edge understands."""


@dataclass(frozen=True, slots=True)
class BodyField:
    """One body of an edge: its field in the frame's oneof, its class, and both directions."""

    name: str
    kind: type
    to_wire: Callable[[Any], Message]
    from_wire: Callable[[Any], Any]


FrameT = TypeVar("FrameT", bound=Message)


class FrameCodec(Generic[FrameT]):
    """Converts the frames of one direction of one edge."""

    def __init__(self, frame_class: type[FrameT], bodies: tuple[BodyField, ...]) -> None:
        self._frame_class = frame_class
        self._by_kind: Mapping[type, BodyField] = {body.kind: body for body in bodies}
        self._by_name: Mapping[str, BodyField] = {body.name: body for body in bodies}

    def encode(self, frame: Frame[Any]) -> bytes:
        return self.to_wire(frame).SerializeToString()

    def decode(self, data: bytes) -> Frame[Any]:
        """Raises MalformedFrame."""
        try:
            wire = self._frame_class.FromString(data)
        except DecodeError as error:
            raise MalformedFrame(f"{len(data)} bytes are no {self._frame_class.DESCRIPTOR.name}") from error
        return self.from_wire(wire)

    def to_wire(self, frame: Frame[Any]) -> FrameT:
        wire: Any = self._frame_class()
        match frame:
            case Data(connection, number, ack, body):
                wire.header.connection, wire.header.number, wire.header.ack = connection, number, ack
                field = self._by_kind[type(body)]
                getattr(wire, field.name).CopyFrom(field.to_wire(body))
            case Heartbeat(connection, ack):
                wire.header.connection, wire.header.ack = connection, ack
            case Hello():
                wire.hello.CopyFrom(_hello_to_wire(frame))
            case Welcome():
                wire.welcome.CopyFrom(_welcome_to_wire(frame))
            case Reject(code, message):
                wire.reject.code, wire.reject.message = _REJECT_TO_WIRE[code], message
        return wire  # type: ignore[no-any-return]

    def from_wire(self, wire: Any) -> Frame[Any]:
        """Raises MalformedFrame."""
        if wire.HasField("header"):
            return self._decode_data(wire)
        fields = wire.DESCRIPTOR.fields_by_name
        if "hello" in fields and wire.HasField("hello"):
            return _hello_from_wire(wire.hello)
        if "welcome" in fields and wire.HasField("welcome"):
            return _welcome_from_wire(wire.welcome)
        if "reject" in fields and wire.HasField("reject"):
            code = _REJECT_FROM_WIRE.get(wire.reject.code, RejectCode.INVALID)
            return Reject(code, wire.reject.message)
        raise MalformedFrame("a frame needs a handshake or a header")

    def _decode_data(self, wire: Any) -> Frame[Any]:
        header = wire.header
        if header.number == 0:
            return Heartbeat(header.connection, header.ack)
        name = wire.WhichOneof("body")
        if name is None:
            raise MalformedFrame(f"message {header.number} has no body")
        body = self._by_name[name].from_wire(getattr(wire, name))
        return Data(header.connection, header.number, header.ack, body)


@dataclass(frozen=True, slots=True)
class Edge:
    """A kind of session, and what either end says on it."""

    kind: str
    from_client: FrameCodec[Any]
    from_server: FrameCodec[Any]


def _hello_to_wire(hello: Hello) -> session_pb2.Hello:
    return session_pb2.Hello(
        key=hello.key,
        connection=hello.connection,
        incarnation=hello.incarnation,
        received=hello.received,
        epoch=hello.epoch,
        name=hello.name,
        version=hello.version,
    )


def _hello_from_wire(wire: session_pb2.Hello) -> Hello:
    return Hello(wire.key, wire.connection, wire.incarnation, wire.received, wire.epoch, wire.name, wire.version)


def _welcome_to_wire(welcome: Welcome) -> session_pb2.Welcome:
    return session_pb2.Welcome(
        connection=welcome.connection,
        incarnation=welcome.incarnation,
        epoch=welcome.epoch,
        server_epoch=welcome.server_epoch,
        received=welcome.received,
        fresh=welcome.fresh,
        version=welcome.version,
    )


def _welcome_from_wire(wire: session_pb2.Welcome) -> Welcome:
    return Welcome(
        wire.connection, wire.incarnation, wire.epoch, wire.server_epoch, wire.received, wire.fresh, wire.version
    )
