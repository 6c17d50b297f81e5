"""What a version of the session protocol consists of, as text: the fields of each record, the values of each enum.

Beside golden frames it tells a version's messages apart from those of another one. `OlderCodec` speaks by it: it says
and hears what a process of that version would.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any, get_args, get_origin

import msgspec

from coppice.edge.codec import Codec, Edge, MalformedFrame
from coppice.session.versions import Versions
from tests.fakes.message_values import fields, is_record, members, plain

Fields = dict[str, dict[str, str]]  # by record: its fields in their order, each with what it holds
Enums = dict[str, list[str]]
ALTERNATIVE = " | "
RUN = "tuple of "


def shape_of(kinds: Any) -> tuple[Fields, Enums]:
    """Of every record and enum that stands in messages of `kinds`."""
    records: Fields = {}
    enums: Enums = {}
    _collect(kinds, records, enums)
    return dict(sorted(records.items())), dict(sorted(enums.items()))


def _collect(kind: Any, records: Fields, enums: Enums) -> None:
    kind, _ = plain(kind)
    if is_record(kind):
        name = _record(kind).__name__
        if name not in records:
            records[name] = {field: described(hint) for field, hint in fields(kind).items()}
            for hint in fields(kind).values():
                _collect(hint, records, enums)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        enums[kind.__name__] = sorted(str(one.value) for one in kind)
    else:
        for argument in get_args(kind):
            _collect(argument, records, enums)


def described(hint: Any) -> str:
    """`int 0..255`, `bytes of 16`, `Grant | Gone`, `tuple of Growth`."""
    if len(members(hint)) > 1:
        return ALTERNATIVE.join(described(member) for member in members(hint))
    kind, limits = plain(hint)
    if kind != hint and len(members(kind)) > 1:
        return described(kind)
    if is_record(kind):
        return str(_record(kind).__name__)
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        is_run = others == [...]
        return f"{RUN}{described(first)}" if is_run else f"tuple({', '.join(map(described, get_args(kind)))})"
    told = [f"{name} {limit}" for name, limit in sorted(limits.items())]
    return " ".join([kind.__name__, *told])


def _record(kind: Any) -> Any:
    return get_origin(kind) or kind


class OlderCodec(Codec[Any]):
    """What an older process says, by today's types: without the fields that it does not have. It hears without those
    that it does not know, and never a message or a value that it does not know: a test fails then."""

    def __init__(self, codec: Codec[Any], records: Fields, enums: Enums) -> None:
        super().__init__(codec.kinds)
        self._records, self._enums = records, enums
        newest = self.encode
        self.encode = lambda message: msgspec.msgpack.encode(self._cut(msgspec.msgpack.decode(newest(message))))

    def decode(self, data: bytes | memoryview) -> Any:
        try:
            raw = msgspec.msgpack.decode(data)
        except msgspec.MsgspecError as error:
            raise MalformedFrame(str(error)) from None
        return super().decode(msgspec.msgpack.encode(self._cut(raw)))

    def _cut(self, raw: Any) -> Any:
        return self._part(raw, self.kinds)

    def _part(self, raw: Any, hint: Any) -> Any:
        kind, _ = plain(hint)
        if raw is None or (not is_record(kind) and not get_args(kind)):
            return self._value(raw, kind)
        if len(members(kind)) > 1:
            tagged = {_record(member).__name__: member for member in members(kind) if is_record(member)}
            return self._part(raw, tagged[raw[0]]) if isinstance(raw, list) else raw
        if is_record(kind):
            return self._record(raw, kind)
        assert get_args(kind)[-1] is ..., f"{hint} is not known here"
        return [self._part(item, get_args(kind)[0]) for item in raw]

    def _record(self, raw: list[Any], kind: Any) -> list[Any]:
        name = _record(kind).__name__
        assert name in self._records, f"{name} is younger than the peer"
        tag = raw[:1] if _record(kind).__struct_config__.tag else []
        known = list(fields(kind).items())[: len(self._records[name])]
        return tag + [self._part(value, hint) for value, (_, hint) in zip(raw[len(tag) :], known, strict=False)]

    def _value(self, raw: Any, kind: Any) -> Any:
        if isinstance(kind, type) and issubclass(kind, Enum):
            assert raw in self._enums[kind.__name__], f"{kind.__name__} {raw!r} is younger than the peer"
        return raw


def older_edge(edge: Edge, version: int, shapes: dict[str, Fields], enums: Enums) -> Edge:
    """The end of a session in a process that speaks no protocol above `version`."""
    return replace(
        edge,
        from_client=OlderCodec(edge.from_client, shapes[f"{edge.kind} from client"], enums),
        from_server=OlderCodec(edge.from_server, shapes[f"{edge.kind} from server"], enums),
        speaks=Versions(version, version),
    )
