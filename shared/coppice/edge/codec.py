"""Messages <-> bytes, by their annotations: msgpack, as `coppice.messages.record` describes it.

    kind of session     said by the client    said by the server
    index               FromClient            ToClient              a client at the cache service
    workers             FromWorker            ToWorker              a worker at the cache service
    steps               StepPlan              StepResult            a scheduler at a worker

Everything that is said stands in a frame of `coppice.session.frames`. Each direction has its longest message: what is
longer is cut off before it is read, and never sent. Of a block, 8 bytes name it and 16 seal it.

    index     client   64 MiB   the claims of a session, up to 24 bytes for each block of each lease; prompts, 8 MiB
              server   32 MiB   grants for 8 MiB of prompts, 24 bytes for each block
    workers   client   64 MiB   a registration, 24 bytes for each block of both pools: 2.7 million of them
              server    8 MiB   a fence, 18 bytes for each lease
    steps     client   32 MiB   8 MiB of prompts to attach with their blocks and sampling options
              server   16 MiB   log-probabilities of a step, 164 bytes for each token: 100,000 of them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from msgspec import Meta, MsgspecError, Struct, msgpack

from coppice.edge.wire import MESSAGE_BYTES_MAX
from coppice.messages.index import FromClient, ToClient
from coppice.messages.record import ITEM_BYTES
from coppice.messages.registration import FromWorker, ToWorker
from coppice.messages.step import StepPlan, StepResult
from coppice.session.frames import Data, Frame, Heartbeat, Hello, Reject, Welcome
from coppice.session.versions import SPOKEN, Versions

T = TypeVar("T")
_Check = Callable[[Any], None]
_REASON_CHARACTERS = 200  # of a peer's own bytes, which the reason may quote


class MalformedFrame(ValueError):
    """Bytes that are no message of those that are expected here. The text says what is wrong, and where."""


class Codec(Generic[T]):
    """One direction of a connection: every message that is said there. May be used by several threads at once."""

    def __init__(self, kinds: Any) -> None:
        """`kinds`: the annotation of what is said, a union of messages."""
        self.encode: Callable[[T], bytes] = msgpack.Encoder().encode
        """Raises OverflowError for a number that has no 64 bits."""
        self.kinds = kinds
        self._decode: Callable[[bytes | memoryview], T] = msgpack.Decoder(kinds).decode
        self._check = _check_of(kinds) or _accept

    def decode(self, data: bytes | memoryview) -> T:
        """Keeps nothing of `data`. Raises MalformedFrame."""
        try:
            message = self._decode(data)
            self._check(message)
        except (MsgspecError, ValueError, RecursionError, OverflowError, MemoryError) as error:
            reason = str(error)[:_REASON_CHARACTERS]
            raise MalformedFrame(f"{len(data)} bytes are no message that is understood here: {reason}") from None
        return message


@dataclass(frozen=True, slots=True)
class Edge:
    """A kind of session, and what either end says on it."""

    kind: str
    from_client: Codec[Frame[Any]]
    from_server: Codec[Frame[Any]]
    client_bytes_max: int = MESSAGE_BYTES_MAX  # of one message, as it is encoded
    server_bytes_max: int = MESSAGE_BYTES_MAX
    speaks: Versions = SPOKEN


def _edge(kind: str, from_client: Any, from_server: Any, client_mib: int, server_mib: int) -> Edge:
    return Edge(
        kind,
        Codec(Hello | Data[from_client] | Heartbeat),
        Codec(Welcome | Reject | Data[from_server] | Heartbeat),
        client_mib << 20,
        server_mib << 20,
    )


# ---- lengths of packed items, which msgspec does not know ----


def _check_of(kind: Any) -> _Check | None:
    """What raises ValueError for a decoded value of type `kind`; None where nothing is packed in it."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        return _union_check(arguments)
    if origin is tuple and arguments[-1] is ...:
        return _each_check(_check_of(arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Struct):
        return _record_check(kind, origin)
    return None


def _union_check(kinds: tuple[Any, ...]) -> _Check | None:
    by_type = {get_origin(kind) or kind: _check_of(kind) or _accept for kind in kinds}

    def check(value: Any) -> None:
        by_type.get(type(value), _accept)(value)

    return None if all(check is _accept for check in by_type.values()) else check


def _each_check(check: _Check | None) -> _Check | None:
    if check is None:
        return None

    def check_each(values: tuple[Any, ...]) -> None:
        for value in values:
            check(value)

    return check_each


def _record_check(kind: Any, record: type[Struct]) -> _Check | None:
    variables = dict(zip(getattr(record, "__parameters__", ()), get_args(kind), strict=True))
    hints = get_type_hints(record, include_extras=True)
    fields = [(name, variables.get(hints[name], hints[name])) for name in record.__struct_fields__]
    packed = [(name, item_bytes) for name, hint in fields if (item_bytes := _item_bytes(hint))]
    inner = [(name, check) for name, hint in fields if (check := _check_of(hint))]

    def check_fields(value: Any) -> None:
        for name, item_bytes in packed:
            length = len(getattr(value, name))
            if length % item_bytes:
                raise ValueError(f"{record.__name__}.{name} has {length} bytes; its items have {item_bytes} each")
        for name, check in inner:
            check(getattr(value, name))

    return check_fields if packed or inner else None


def _item_bytes(hint: Any) -> int:
    """Of a packed field; 0 for any other."""
    metadata = hint.__metadata__ if get_origin(hint) is Annotated else ()
    sizes: list[int] = [(meta.extra or {}).get(ITEM_BYTES, 0) for meta in metadata if isinstance(meta, Meta)]
    return sum(sizes)


def _accept(_: Any) -> None: ...


INDEX = _edge("index", FromClient, ToClient, 64, 32)
WORKERS = _edge("workers", FromWorker, ToWorker, 64, 8)
STEPS = _edge("steps", StepPlan, StepResult, 32, 16)
