"""Namespaces: everything that KV depends on besides tokens.

Encoded as tagged, length-prefixed fields, so that no two different sets of fields share an encoding:

    tag (1 byte) | length (4 bytes, little endian) | value        fields in ascending order of tag

A salt subdivides a namespace for one domain: it stands behind the other fields, so trees and chain keys differ by it
as they do by the model. What a client sends becomes a digest twice, and each time with its domain, so the same salt of
two domains is two salts:

    text ----digest_salt----> 16 bytes ----with_keyed_salt----> 16 bytes in the names of trees
    client   front door       sessions     cache service        its pages, its log, Watch

Salts may be as short as a name, and could be found by trying. The second digest has the seal key, so nobody who reads
the name of a tree can try.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from coppice.ids import DomainId, Namespace

SALT_BYTES = 16
_NUM_FIELDS = 7
_SALT_HEAD = bytes([_NUM_FIELDS + 1]) + SALT_BYTES.to_bytes(4, "little")
_SALT_FIELD_BYTES = len(_SALT_HEAD) + SALT_BYTES


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


def digest_salt(domain: DomainId, text: str) -> bytes:
    """What travels of a client's salt: SALT_BYTES."""
    return blake2b(_framed(domain, text.encode()), digest_size=SALT_BYTES, person=b"coppice.salt.1").digest()


def with_salt(namespace: Namespace, salt: bytes) -> Namespace:
    """The part of a namespace for one salt; the namespace itself for an empty one."""
    assert len(salt) in (0, SALT_BYTES)
    return Namespace(namespace + _SALT_HEAD + salt) if salt else namespace


def salt_of(namespace: Namespace) -> bytes:
    """Empty where there is none."""
    return namespace[-SALT_BYTES:] if namespace[-_SALT_FIELD_BYTES:-SALT_BYTES] == _SALT_HEAD else b""


def without_salt(namespace: Namespace) -> Namespace:
    return Namespace(namespace[:-_SALT_FIELD_BYTES]) if salt_of(namespace) else namespace


def covers(named: Namespace, namespace: Namespace) -> bool:
    """Whether who names the first means the second, too: a namespace stands for its salts, a salted one for itself."""
    return named in (namespace, without_salt(namespace))


def with_keyed_salt(key: bytes, domain: DomainId, namespace: Namespace) -> Namespace:
    """The namespace as the cache service has it: a salt in it is digested once more, under the seal key."""
    salt = salt_of(namespace)
    if not salt:
        return namespace
    keyed = blake2b(_framed(domain, salt), digest_size=SALT_BYTES, key=key, person=b"coppice.salt.2").digest()
    return with_salt(without_salt(namespace), keyed)


def _framed(domain: DomainId, content: bytes) -> bytes:
    name = domain.encode()
    return len(name).to_bytes(4, "little") + name + content
