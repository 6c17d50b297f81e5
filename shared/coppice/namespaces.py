"""Namespaces: everything that KV depends on besides tokens.

Encoded as tagged, length-prefixed fields, so that no two different sets of fields share an encoding:

    tag (1 byte) | length (4 bytes, little endian) | value        fields in ascending order of tag
"""

from __future__ import annotations

from dataclasses import dataclass

from coppice.ids import Namespace

_NUM_FIELDS = 7


@dataclass(frozen=True, slots=True)
class NamespaceFields:
    """Fields of a namespace. Empty strings are encoded too: absent and empty never mean different things."""

    model: str
    revision: str  # digest of the checkpoint
    kv_dtype: str
    block_size: int
    rope: str
    adapter: str = ""
    adapter_revision: str = ""


def encode_namespace(fields: NamespaceFields) -> Namespace:
    values = (
        fields.model,
        fields.revision,
        fields.kv_dtype,
        str(fields.block_size),
        fields.rope,
        fields.adapter,
        fields.adapter_revision,
    )
    encoded = bytearray()
    for tag, value in enumerate(values, start=1):
        raw = value.encode()
        encoded.append(tag)
        encoded += len(raw).to_bytes(4, "little")
        encoded += raw
    return Namespace(bytes(encoded))


def decode_namespace(namespace: Namespace) -> NamespaceFields:
    """The fields of an encoded namespace. Raises ValueError for other bytes: a client may use any as its namespace."""
    values: list[str] = []
    at = 0
    while at < len(namespace):
        length = int.from_bytes(namespace[at + 1 : at + 5], "little")
        raw = namespace[at + 5 : at + 5 + length]
        if namespace[at] != len(values) + 1 or len(namespace) < at + 5 or len(raw) != length:
            raise ValueError(f"field {len(values) + 1} of the namespace is cut off or not where it belongs")
        values.append(raw.decode())
        at += 5 + length
    if len(values) != _NUM_FIELDS:
        raise ValueError(f"the namespace has {len(values)} fields instead of {_NUM_FIELDS}")
    model, revision, kv_dtype, block_size, rope, adapter, adapter_revision = values
    return NamespaceFields(model, revision, kv_dtype, int(block_size), rope, adapter, adapter_revision)
