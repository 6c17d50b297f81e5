"""KV events of the field <-> msgpack. The frames that carry them are `coppice.edge.kv_events.frames`.

A payload is the array [ts, events, dp_rank?]. An event is a map with "type" (vLLM since June 2026, SGLang 0.5.23) or an
array that starts with its type (before). Readers take both, batches that are maps too, and fields that they don't know.
Read from vLLM 0.33 `distributed/kv_events.py` and SGLang 0.5.23 `srt/disaggregation/kv_events.py`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgpack
import numpy as np

from coppice.messages.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    ExtraKey,
    KvEvent,
    KvEventBatch,
    UnknownEvent,
)

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "KvEvent",
    "KvEventBatch",
    "MalformedEvents",
    "UnknownEvent",
    "decode_batch",
    "encode_batch",
]

MAX_PAYLOAD_BYTES = 8 << 20
MAX_ITEMS = 1 << 20
MAX_FIELDS = 64
MAX_TEXT_BYTES = 1 << 16
MAX_HASH_BYTES = 64
MAX_EXTRA_DEPTH = 6

# The order of the array form. vLLM appended every field at the end, so an older reader sees a longer array.
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "locality", "ownership")
_ALWAYS_SENT = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}


class MalformedEvents(ValueError):
    """A payload that is no batch of KV events. The text says what was wrong, and in which event."""


# ---- out ----


def encode_batch(batch: KvEventBatch, form: Literal["map", "array"] = "map") -> bytes:
    """The payload of one message. form: how events are written; "array" is what readers from before June 2026 expect.

    `cache_salt` exists in the map form only. Raises ValueError for a batch that the wire cannot say.
    """
    events = [_event_to_wire(event, form) for event in batch.events]
    wire: list[Any] = [batch.ts, events]
    if batch.dp_rank is not None:
        wire.append(batch.dp_rank)
    try:
        return cast(bytes, msgpack.packb(wire, use_bin_type=True))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"the batch has no msgpack: {error}") from error


def _event_to_wire(event: KvEvent, form: Literal["map", "array"]) -> dict[str, Any] | list[Any]:
    match event:
        case BlockStored():
            fields = {name: getattr(event, name, None) for name in _STORED_FIELDS}
            fields["token_ids"] = _unpack_tokens(event.tokens)
            if event.lookahead is not None:
                fields["lookahead_token_ids"] = [_unpack_tokens(tokens) for tokens in event.lookahead]
            if form == "map" and event.cache_salt is not None:
                fields["cache_salt"] = event.cache_salt
        case BlockRemoved():
            fields = {name: getattr(event, name) for name in _REMOVED_FIELDS}
        case AllBlocksCleared():
            fields = {}
        case UnknownEvent():
            raise ValueError(f"cannot write an event of the unknown type {event.type!r}")
    kind = type(event).__name__
    if form == "map":
        return {"type": kind} | {
            name: value for name, value in fields.items() if value is not None or name in _ALWAYS_SENT
        }
    values = list(fields.values())
    while values and values[-1] is None:
        values.pop()
    return [kind, *values]


def _unpack_tokens(tokens: bytes) -> list[int]:
    return cast(list[int], np.frombuffer(tokens, dtype="<u4").tolist())


# ---- in ----


def decode_batch(payload: bytes, *, max_bytes: int = MAX_PAYLOAD_BYTES) -> KvEventBatch:
    """Reads one message of any engine. Raises MalformedEvents; nothing else, whatever the bytes are."""
    wire = _unpack(payload, max_bytes)
    if isinstance(wire, dict):
        rank = wire.get("data_parallel_rank", wire.get("attn_dp_rank"))
        ts, events = wire.get("ts"), wire.get("events")
    elif isinstance(wire, list) and len(wire) >= 2:
        ts, events, rank = wire[0], wire[1], wire[2] if len(wire) > 2 else None
    else:
        raise MalformedEvents(f"the payload is {_shape(wire)}, not an array of time and events")
    seconds, rank = _finite(ts), _optional(rank, int, "data-parallel rank")
    if not isinstance(events, list):
        raise MalformedEvents(f"the events are {_shape(events)}, not an array")
    if rank is not None and not 0 <= rank < 1 << 31:
        raise MalformedEvents(f"the data-parallel rank is {rank}")
    return KvEventBatch(seconds, tuple(_read_event(index, event) for index, event in enumerate(events)), rank)


def _unpack(payload: bytes, max_bytes: int) -> Any:
    if len(payload) > max_bytes:
        raise MalformedEvents(f"the payload has {len(payload)} bytes; at most {max_bytes} are read")
    try:
        return msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=True,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_FIELDS,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=MAX_TEXT_BYTES,
            max_ext_len=MAX_TEXT_BYTES,
        )
    except (ValueError, msgpack.UnpackException, OverflowError) as error:
        raise MalformedEvents(f"the payload is not the msgpack of one batch: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__} {str(error)[:120]}".strip()


def _finite(ts: Any) -> float:
    if type(ts) not in (float, int):
        raise MalformedEvents(f"the time of the batch is {_shape(ts)}, not a number")
    try:
        value = float(ts)
    except OverflowError:
        raise MalformedEvents("the time of the batch is out of range") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise MalformedEvents(f"the time of the batch is {value}")
    return value


def _read_event(index: int, wire: Any) -> KvEvent:
    try:
        kind, fields = _kind_and_fields(wire)
        match kind:
            case "BlockStored":
                return _read_stored(fields)
            case "BlockRemoved":
                return _read_removed(fields)
            case "AllBlocksCleared":
                return AllBlocksCleared()
            case _:
                return UnknownEvent(kind[:64])
    except MalformedEvents as error:
        raise MalformedEvents(f"event {index}: {error}") from error


def _kind_and_fields(wire: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(wire, dict):
        kind = wire.get("type")
        fields = wire
    elif isinstance(wire, list) and wire:
        kind = wire[0]
        names = _STORED_FIELDS if kind == "BlockStored" else _REMOVED_FIELDS
        fields = dict(zip(names, wire[1:], strict=False))
    else:
        raise MalformedEvents(f"is {_shape(wire)}, neither a map nor an array with a type")
    if type(kind) is not str:
        raise MalformedEvents(f"its type is {_shape(kind)}, not text")
    return kind, fields


def _read_stored(fields: dict[str, Any]) -> BlockStored:
    size = fields.get("block_size")
    if type(size) is not int or not 0 < size <= MAX_ITEMS:
        raise MalformedEvents(f"block_size is {size if type(size) is int else _shape(size)}")
    hashes = _read_hashes(fields)
    parent = fields.get("parent_block_hash")
    tokens, lookahead = _read_tokens(fields, size, len(hashes))
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if parent is None else _read_hash(parent),
        tokens=tokens,
        block_size=size,
        lora_id=_optional(fields.get("lora_id"), int, "lora_id"),
        medium=_optional(fields.get("medium"), str, "medium"),
        lora_name=_optional(fields.get("lora_name"), str, "lora_name"),
        extra_keys=_read_extra_keys(fields.get("extra_keys"), len(hashes)),
        group_idx=_optional(fields.get("group_idx"), int, "group_idx"),
        kv_cache_spec_kind=_optional(fields.get("kv_cache_spec_kind"), str, "kv_cache_spec_kind"),
        kv_cache_spec_sliding_window=_optional(
            fields.get("kv_cache_spec_sliding_window"), int, "kv_cache_spec_sliding_window"
        ),
        locality=_optional(fields.get("locality"), str, "locality"),
        ownership=_optional(fields.get("ownership"), str, "ownership"),
        session_id=_optional(fields.get("session_id"), str, "session_id"),
        cache_salt=_optional(fields.get("cache_salt"), str, "cache_salt"),
        lookahead=lookahead,
    )


def _read_removed(fields: dict[str, Any]) -> BlockRemoved:
    return BlockRemoved(
        block_hashes=_read_hashes(fields),
        medium=_optional(fields.get("medium"), str, "medium"),
        group_idx=_optional(fields.get("group_idx"), int, "group_idx"),
        locality=_optional(fields.get("locality"), str, "locality"),
        ownership=_optional(fields.get("ownership"), str, "ownership"),
    )


def _read_hashes(fields: dict[str, Any]) -> tuple[BlockHash, ...]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list):
        raise MalformedEvents(f"block_hashes is {_shape(hashes)}, not an array")
    return tuple([_read_hash(block_hash) for block_hash in hashes])


def _read_hash(block_hash: Any) -> BlockHash:
    if type(block_hash) is int or (type(block_hash) is bytes and 0 < len(block_hash) <= MAX_HASH_BYTES):
        return block_hash
    raise MalformedEvents(f"a block hash is {_shape(block_hash)}, neither a 64-bit integer nor a digest")


def _read_tokens(fields: dict[str, Any], size: int, num_blocks: int) -> tuple[bytes, tuple[bytes, ...] | None]:
    ids = fields.get("token_ids")
    if not isinstance(ids, list):
        raise MalformedEvents(f"token_ids is {_shape(ids)}, not an array")
    if ids and isinstance(ids[0], list):
        return _read_bigrams(ids, size, num_blocks)
    beyond = fields.get("lookahead_token_ids")
    if beyond is None:
        return _pack(ids), None
    if not isinstance(beyond, list) or len(beyond) != num_blocks:
        raise MalformedEvents(f"lookahead_token_ids is {_shape(beyond)}, not an array with an entry per block")
    return _pack(ids), tuple(_pack(tokens) for tokens in beyond)


def _pack(ids: Any) -> bytes:
    if not isinstance(ids, list):
        raise MalformedEvents(f"token ids are {_shape(ids)}, not an array")
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError) as error:
        raise MalformedEvents(f"a token id is no unsigned 32-bit integer: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _read_bigrams(pairs: list[Any], size: int, num_blocks: int) -> tuple[bytes, tuple[bytes, ...]]:
    """SGLang under speculative decoding keys a block by pairs (token, next token): its tokens, and one beyond it."""
    try:
        table = np.array(pairs, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedEvents(f"token_ids holds pairs that are none: {_reason(error)}") from error
    if table.ndim != 2 or table.shape[1] != 2 or len(table) != size * num_blocks:
        raise MalformedEvents(f"token_ids has pairs of shape {table.shape} for {num_blocks} blocks of {size}")
    if table.min() < 0 or table.max() >= 1 << 32:
        raise MalformedEvents("a token id is no unsigned 32-bit integer")
    packed = table.astype("<u4")
    return packed[:, 0].tobytes(), tuple(last.tobytes() for last in packed[size - 1 :: size, 1])


def _read_extra_keys(wire: Any, num_blocks: int) -> tuple[tuple[ExtraKey, ...] | None, ...] | None:
    if wire is None:
        return None
    if not isinstance(wire, list) or len(wire) != num_blocks:
        raise MalformedEvents(
            f"extra_keys is {_shape(wire)}, not an array with an entry for each of {num_blocks} blocks"
        )
    if any(entry is not None and not isinstance(entry, list) for entry in wire):
        raise MalformedEvents("an entry of extra_keys is neither nil nor an array")
    return tuple([None if entry is None else _frozen(entry, MAX_EXTRA_DEPTH) for entry in wire])


def _frozen(value: Any, depth: int) -> Any:
    if isinstance(value, list | dict) and not depth:
        raise MalformedEvents(f"an entry of extra_keys is nested deeper than {MAX_EXTRA_DEPTH}")
    if isinstance(value, list):
        return tuple([_frozen(item, depth - 1) for item in value])
    if isinstance(value, dict):
        pairs = [(str(key), _frozen(item, depth - 1)) for key, item in value.items()]
        return tuple(sorted(pairs, key=lambda pair: pair[0]))
    if value is None or isinstance(value, str | int | float | bytes):
        return value
    raise MalformedEvents(f"an entry of extra_keys holds {_shape(value)}")


def _optional(value: Any, kind: type, name: str) -> Any:
    if value is None or type(value) is kind:
        return value
    raise MalformedEvents(f"{name} is {_shape(value)}, not {'text' if kind is str else 'an integer'}")


def _shape(value: Any) -> str:
    """Says what a thing is without showing what it holds: it may be long, and it may be somebody's."""
    if value is None:
        return "missing"
    names = {list: "an array", dict: "a map", str: "text", bytes: "bytes", int: "an integer", float: "a number"}
    name = names.get(type(value), type(value).__name__)
    return f"{name} of {len(value)}" if isinstance(value, Sequence | dict) else name
