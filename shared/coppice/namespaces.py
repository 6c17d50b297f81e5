"""Namespaces: everything that KV depends on besides tokens.

Encoded as tagged, length-prefixed fields, so that no two different sets of fields share an encoding:

    tag (1 byte) | length (4 bytes, little endian) | value        fields in ascending order of tag
"""

from __future__ import annotations

from dataclasses import dataclass

from coppice.ids import Namespace


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
