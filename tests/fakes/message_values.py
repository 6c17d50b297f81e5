"""Values of messages by their annotations: the same ones each time for golden frames, drawn ones for round trips."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import UnionType
from typing import Annotated, Any, NewType, Union, get_args, get_origin, get_type_hints

import hypothesis.strategies as st
from msgspec import Meta, Struct

from coppice.edge.codec import INDEX, STEPS, WORKERS, Codec
from coppice.messages.record import ITEM_BYTES
from coppice_scheduler.edge.ipc.door_messages import DOOR_TO_PARENT, DOOR_TO_PLANNER, PARENT_TO_DOOR, PLANNER_TO_DOOR
from coppice_scheduler.edge.ipc.planner_messages import FROM_PLANNER, TO_PLANNER

CODECS: dict[str, Codec[Any]] = {
    **{f"{edge.kind} from client": edge.from_client for edge in (INDEX, WORKERS, STEPS)},
    **{f"{edge.kind} from server": edge.from_server for edge in (INDEX, WORKERS, STEPS)},
    "parent to door": PARENT_TO_DOOR,
    "door to parent": DOOR_TO_PARENT,
    "planner to door": PLANNER_TO_DOOR,
    "door to planner": DOOR_TO_PLANNER,
    "parent to planner": TO_PLANNER,
    "planner to parent": FROM_PLANNER,
}
U64_MAX = (1 << 64) - 1
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


def plain(kind: Any) -> tuple[Any, dict[str, Any]]:
    """Without NewType and Annotated: the type, and what its Meta says."""
    limits: dict[str, Any] = {}
    while isinstance(kind, NewType) or get_origin(kind) is Annotated:
        if isinstance(kind, NewType):
            kind = kind.__supertype__
            continue
        for meta in kind.__metadata__:
            assert isinstance(meta, Meta)
            found = {name: getattr(meta, name) for name in ("ge", "le", "min_length", "max_length")}
            limits |= {name: limit for name, limit in found.items() if limit is not None} | (meta.extra or {})
        kind = kind.__origin__
    return kind, limits


def members(kind: Any) -> tuple[Any, ...]:
    """Of a union; `kind` alone where it is none."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def fields(kind: Any) -> dict[str, Any]:
    """Annotations by field, those of a generic record as it is bound."""
    record = get_origin(kind) or kind
    bound = dict(zip(getattr(record, "__parameters__", ()), get_args(kind), strict=True))
    hints = get_type_hints(record, include_extras=True)
    return {name: bound.get(hints[name], hints[name]) for name in record.__struct_fields__}


def is_record(kind: Any) -> bool:
    record = get_origin(kind) or kind
    return isinstance(record, type) and issubclass(record, Struct)


# ---- the same ones each time ----


def examples(kind: Any, number: int = 1, name: str = "") -> list[Any]:
    """One value; of a union, and of what holds one, one value for each member. `number` and `name`: of the field."""
    kind, limits = plain(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if len(members(kind)) > 1:
        return [
            value for member in members(kind) if member is not type(None) for value in examples(member, number, name)
        ]
    if is_record(kind):
        columns = [examples(hint, place, field) for place, (field, hint) in enumerate(fields(kind).items(), 1)]
        longest = max(map(len, columns), default=1)
        record = origin or kind
        return [record(*(column[place % len(column)] for column in columns)) for place in range(longest)]
    if origin is tuple and arguments[-1] is not ...:
        return [tuple(examples(argument, number, name)[0] for argument in arguments)]
    if origin in (tuple, frozenset):
        return [origin((value,)) for value in examples(arguments[0], number, name)]
    if origin is not None and issubclass(origin, Mapping):
        return [{name: value} for value in examples(arguments[1], number, name)]
    return [_scalar(kind, limits, number, name)]


def _scalar(kind: Any, limits: dict[str, Any], number: int, name: str) -> Any:
    if issubclass(kind, Enum):
        return list(kind)[1]  # no default, and the same one when others come
    if kind is bytes:
        size = limits.get("min_length", limits.get(ITEM_BYTES, 3))
        return bytes((number + place) % 256 for place in range(size))
    return {bool: True, int: number, float: number / 4, str: name}[kind]


def golden_values(codec: Codec[Any]) -> dict[str, Any]:
    """Every message of the codec, by names that tell what is in it."""
    found: dict[str, Any] = {}
    for value in examples(codec.kinds):
        found[_name(value)] = value
    return found


def _name(value: Any) -> str:
    """Data(OpBatch(Acquire)): the message, and the first messages in it."""
    inner = [getattr(value, field) for field in value.__struct_fields__]
    inner = [part[0] if isinstance(part, tuple) and part else part for part in inner]
    tagged = [part for part in inner if isinstance(part, Struct) and type(part).__struct_config__.tag]
    return type(value).__name__ + (f"({_name(tagged[0])})" if tagged else "")


# ---- drawn ones ----


def values(kind: Any) -> st.SearchStrategy[Any]:
    kind, limits = plain(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if len(members(kind)) > 1:
        return st.one_of(*(values(member) for member in members(kind)))
    if is_record(kind):
        return st.builds(origin or kind, **{name: values(hint) for name, hint in fields(kind).items()})
    if origin is tuple and arguments[-1] is not ...:
        return st.tuples(*map(values, arguments))
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=2).map(tuple)
    if origin is frozenset:
        return st.frozensets(values(arguments[0]), max_size=2)
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    if kind is bytes:
        item_bytes = limits.get(ITEM_BYTES, 1)
        size = limits.get("min_length", 0), limits.get("max_length", 3)
        return st.lists(st.binary(min_size=item_bytes, max_size=item_bytes), min_size=size[0], max_size=size[1]).map(
            b"".join
        )
    if kind is int:
        return st.integers(limits.get("ge", -(1 << 63)), limits.get("le", U64_MAX))
    if kind is type(None) or kind is bool or issubclass(kind, Enum):
        return st.just(None) if kind is type(None) else st.booleans() if kind is bool else st.sampled_from(kind)
    return st.floats(allow_nan=False) if kind is float else TEXT
