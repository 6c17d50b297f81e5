"""Records of the recovery log: events of the core as bytes that only we can read, and that nobody can change unseen.

    record   magic "cL" | version u8 | zero u8 | length u32 | ciphertext | tag 16        little endian
    payload  msgpack [contexts, events]
             context [worker id, worker epoch, domain, namespace, chain key]     said once per record
             chain key [secret, proof], both empty where nothing is stored
             event   [0, context, tier, parent seal, tokens, handles, seals]      Stored
                     [1, context, tier, handles, seals, all below]                Removed
                     [2, context]                                                 Cleared

Prompts stand in these records, and Redis is a place where others can read. So the payload is encrypted, and
authenticated together with its header, by AES-256-GCM. The key is the stream's, derived from the seal key; streams of
before a change of that are read while the one of then is given, too. The nonce is the place in the stream. A record
that was changed, moved, doubled or left out is noticed. Whoever writes must never use a (stream, index) twice; stream
ids are 16 random bytes. A forger who had the key would gain nothing but wrong hints, since every entry is judged by
what the workers report.

Each record says its version. The version before is read as well, from its first release on; a log of any other one is
left alone, and the next snapshot replaces it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgpack
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from coppice.handles import HANDLE_BYTES
from coppice.ids import TOKEN_BYTES, DomainId, Namespace, WorkerEpoch, WorkerId
from coppice.seals import NO_CHAIN_KEY, SEAL_BYTES, ChainKey
from coppice_cache.core.base.events import Cleared, IndexEvent, Removed, Stored, Tier

VERSION = 4  # what is written
STREAM_BYTES = 16
TAG_BYTES = 16
_NONCE_BYTES = 12
RECORD_BYTES_MAX = 8 << 20
_MAGIC = b"cL"
_HEADER = struct.Struct("<2sBBI")
_STORED, _REMOVED, _CLEARED = range(3)

_Context = tuple[WorkerId, WorkerEpoch, DomainId, Namespace]
_Known = tuple[_Context, ChainKey]


class CorruptLog(Exception):
    """A record that is not what we wrote there; says which one and what is wrong."""


@dataclass(frozen=True, slots=True)
class LogKeys:
    """A key for each stream, from each secret. Streams are written under the first one and read under any."""

    secrets: tuple[bytes, ...]

    @staticmethod
    def derive(*seal_keys: bytes) -> LogKeys:
        return LogKeys(tuple(blake2b(key=key, digest_size=32, person=b"coppice.log.key").digest() for key in seal_keys))

    def of_stream(self, stream: bytes) -> list[AESGCM]:
        assert len(stream) == STREAM_BYTES
        return [AESGCM(blake2b(stream, key=secret, digest_size=32).digest()) for secret in self.secrets]


def seal_record(keys: LogKeys, stream: bytes, index: int, events: Sequence[IndexEvent]) -> bytes:
    """One record. `index` is its place in the stream, from 0."""
    payload = _pack(events)
    header = _HEADER.pack(_MAGIC, VERSION, 0, len(payload))
    return header + keys.of_stream(stream)[0].encrypt(_nonce(index), payload, header)


def open_record(keys: LogKeys, stream: bytes, index: int, record: bytes) -> list[IndexEvent]:
    """The events of one record. Raises CorruptLog."""
    if not _HEADER.size + TAG_BYTES <= len(record) <= RECORD_BYTES_MAX:
        raise CorruptLog(f"record {index} has {len(record)} bytes")
    magic, version, _, length = _HEADER.unpack_from(record)
    if magic != _MAGIC:
        raise CorruptLog(f"record {index} does not start like a record of the log")
    if version not in _PAYLOADS:
        raise CorruptLog(f"record {index} has version {version}; this service reads {_listed(_PAYLOADS)}")
    if length != len(record) - _HEADER.size - TAG_BYTES:
        raise CorruptLog(f"record {index} is cut: it claims {length} bytes and has {len(record)} in all")
    header, ciphertext = record[: _HEADER.size], record[_HEADER.size :]
    for key in keys.of_stream(stream):
        try:
            return _PAYLOADS[version](key.decrypt(_nonce(index), ciphertext, header), index)
        except InvalidTag:
            continue
    raise CorruptLog(f"record {index} was changed, or written under another seal key")


def num_bytes(event: IndexEvent) -> int:
    """About how much an event adds to a record."""
    match event:
        case Stored():
            return 32 + len(event.tokens) + len(event.handles) + len(event.seals)
        case Removed():
            return 16 + len(event.handles) + len(event.seals)
        case Cleared():
            return 16


def _nonce(index: int) -> bytes:
    return index.to_bytes(_NONCE_BYTES, "little")


def _pack(events: Sequence[IndexEvent]) -> bytes:
    contexts: dict[_Context, int] = {}
    chain_keys: dict[_Context, ChainKey] = {}
    packed: list[tuple[object, ...]] = []
    for event in events:
        key = (event.worker_id, event.worker_epoch, event.domain, event.namespace)
        context = contexts.setdefault(key, len(contexts))
        match event:
            case Stored():
                chain_keys[key] = event.chain_key
                content = (event.parent_seal, event.tokens, event.handles, event.seals)
                packed.append((_STORED, context, int(event.tier), *content))
            case Removed():
                packed.append((_REMOVED, context, int(event.tier), event.handles, event.seals, event.all_below))
            case Cleared():
                packed.append((_CLEARED, context))
    said = [(*context, chain_keys.get(context, NO_CHAIN_KEY)) for context in contexts]
    result: bytes = msgpack.packb((said, packed))
    return result


def _unpack(payload: bytes, index: int) -> list[IndexEvent]:
    """What is authentic was written by some version of us; still, nothing is taken for well-formed that is not."""
    try:
        contexts, packed = msgpack.unpackb(payload, use_list=False)
        known = [_context(*context) for context in contexts]
        return [_READERS[fields[0]](known, *fields[1:]) for fields in packed]
    except CorruptLog as corrupt:
        raise CorruptLog(f"record {index}: {corrupt}") from None
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
        raise CorruptLog(f"record {index} holds no events: {error!r}") from error


def _context(
    worker_id: str, epoch: int, domain: str, namespace: bytes, chain_key: tuple[bytes, bytes]
) -> tuple[_Context, ChainKey]:
    key = ChainKey(*chain_key)
    types = (type(worker_id), type(epoch), type(domain), type(namespace), type(key.secret), type(key.proof))
    if types != (str, int, str, bytes, bytes, bytes):
        raise CorruptLog("the fields of a context have other types")
    return (WorkerId(worker_id), WorkerEpoch(epoch), DomainId(domain), Namespace(namespace)), key


def _stored(
    known: list[_Known], context: int, tier: int, parent: bytes, tokens: bytes, handles: bytes, seals: bytes
) -> Stored:
    _check_run(handles, seals)
    count = len(handles) // HANDLE_BYTES
    if type(tokens) is not bytes or not tokens or len(tokens) % (count * TOKEN_BYTES):
        raise CorruptLog(f"the tokens of {count} blocks have another length")
    if type(parent) is not bytes or len(parent) not in (0, SEAL_BYTES):
        raise CorruptLog("a parent's seal has another length")
    where, chain_key = known[context]
    return Stored(*where, parent, tokens, handles, seals, Tier(tier), chain_key)


def _removed(known: list[_Known], context: int, tier: int, handles: bytes, seals: bytes, all_below: bool) -> Removed:
    _check_run(handles, seals)
    if type(all_below) is not bool:
        raise CorruptLog("what goes with a removed run is no yes or no")
    return Removed(*known[context][0], handles, seals, Tier(tier), all_below)


def _cleared(known: list[_Known], context: int) -> Cleared:
    return Cleared(*known[context][0])


def _check_run(handles: bytes, seals: bytes) -> None:
    if type(handles) is not bytes or type(seals) is not bytes or not handles or len(handles) % HANDLE_BYTES:
        raise CorruptLog("handles are missing or cut")
    if len(seals) * HANDLE_BYTES != len(handles) * SEAL_BYTES:
        raise CorruptLog("handles and seals differ in number")


_READERS: dict[int, Callable[..., Any]] = {_STORED: _stored, _REMOVED: _removed, _CLEARED: _cleared}
_PAYLOADS: dict[int, Callable[[bytes, int], list[IndexEvent]]] = {4: _unpack}  # readers of VERSION and of the last one


def _listed(versions: Iterable[int]) -> str:
    return " and ".join(f"version {version}" for version in sorted(versions))
