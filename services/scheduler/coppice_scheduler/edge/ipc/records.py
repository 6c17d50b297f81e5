"""Frozen dataclasses as plain lists and back, by their annotations. What does not fit the annotations is refused.

    Refused(RefusedReason.EMPTY, "no", 0)  <->  ["empty", "no", 0]

Fields go by place: both ends run the same code. Known annotations: int, float, str, bytes, bool, NewType, Enum,
`X | None`, `tuple[X, ...]`, `tuple[X, Y]`, `frozenset[X]`, `Mapping[X, Y]` and dataclasses of these.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_Convert = Callable[[Any], Any]


class RecordError(ValueError):
    """What came is not what the annotations say; the message names the place, never the value."""


def to_plain(record: Any) -> list[Any]:
    """What msgpack can pack, of a dataclass."""
    kind: Any = type(record)
    plain: list[Any] = _encoder(kind)(record)
    return plain


def from_plain(kind: type[T], plain: Any) -> T:
    """Raises RecordError."""
    of_kind: Any = kind
    record: T = _decoder(of_kind)(plain)
    return record


@cache
def _encoder(kind: Any) -> _Convert:
    if isinstance(kind, NewType):
        return _encoder(kind.__supertype__)
    if kind in _PLAIN:
        return _same
    if dataclasses.is_dataclass(kind):
        fields = [(name, _encoder(hint)) for name, hint in _hints(kind)]
        return lambda record: [encode(getattr(record, name)) for name, encode in fields]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda member: member.value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        inner = _encoder(_not_none(kind))
        return lambda value: None if value is None else inner(value)
    if origin is tuple and arguments[-1] is not ...:
        parts = [_encoder(argument) for argument in arguments]
        return lambda values: [encode(value) for encode, value in zip(parts, values, strict=True)]
    if origin in (tuple, frozenset):
        inner = _encoder(arguments[0])
        return lambda values: [inner(value) for value in values]
    if origin is Mapping:
        key, inner = _encoder(arguments[0]), _encoder(arguments[1])
        return lambda values: {key(name): inner(value) for name, value in values.items()}
    raise TypeError(f"no record holds {kind}")


@cache
def _decoder(kind: Any) -> _Convert:
    if isinstance(kind, NewType):
        return _decoder(kind.__supertype__)
    if kind in _PLAIN:
        return _checked(kind)
    if dataclasses.is_dataclass(kind):
        return _record_decoder(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member_decoder(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        inner = _decoder(_not_none(kind))
        return lambda plain: None if plain is None else inner(plain)
    if origin is tuple and arguments[-1] is not ...:
        parts = [_decoder(argument) for argument in arguments]
        return lambda plain: tuple(decode(value) for decode, value in zip(parts, _list(plain, len(parts)), strict=True))
    if origin in (tuple, frozenset):
        inner = _decoder(arguments[0])
        return lambda plain: origin(inner(value) for value in _list(plain))
    if origin is Mapping:
        key, inner = _decoder(arguments[0]), _decoder(arguments[1])
        return lambda plain: {key(name): inner(value) for name, value in _map(plain).items()}
    raise TypeError(f"no record holds {kind}")


_PLAIN = (int, float, str, bytes, bool)


def _same(value: Any) -> Any:
    return value


def _checked(kind: type) -> _Convert:
    allowed = (float, int) if kind is float else (kind,)

    def decode(plain: Any) -> Any:
        if type(plain) not in allowed:
            raise RecordError(f"{type(plain).__name__} where {kind.__name__} belongs")
        return kind(plain) if kind is float else plain

    return decode


def _record_decoder(kind: Any) -> _Convert:
    fields = [(name, _decoder(hint)) for name, hint in _hints(kind)]

    def decode(plain: Any) -> Any:
        values = _list(plain, len(fields), kind.__name__)
        decoded: list[Any] = []
        try:
            for (_, convert), value in zip(fields, values, strict=True):
                decoded.append(convert(value))
        except RecordError as error:
            raise RecordError(f"{kind.__name__}.{fields[len(decoded)][0]}: {error}") from None
        return kind(*decoded)

    return decode


def _member_decoder(kind: type[Enum]) -> _Convert:
    def decode(plain: Any) -> Any:
        try:
            return kind(plain)
        except (ValueError, TypeError):
            raise RecordError(f"no member of {kind.__name__}") from None

    return decode


def _hints(kind: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(kind)]


def _not_none(kind: Any) -> Any:
    (rest,) = [part for part in get_args(kind) if part is not type(None)]
    return rest


def _list(plain: Any, length: int | None = None, name: str = "a list") -> list[Any]:
    if type(plain) is not list:
        raise RecordError(f"{type(plain).__name__} where {name} belongs")
    if length is not None and len(plain) != length:
        raise RecordError(f"{len(plain)} values where {name} has {length}")
    return plain


def _map(plain: Any) -> dict[Any, Any]:
    if type(plain) is not dict:
        raise RecordError(f"{type(plain).__name__} where a map belongs")
    return plain
