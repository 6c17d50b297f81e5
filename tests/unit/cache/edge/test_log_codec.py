"""Records of the recovery log: what is written is read again, what was touched is refused, nothing can be read."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

import msgpack
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.handles import HANDLE_BYTES
from coppice.ids import DomainId, Namespace, WorkerEpoch, WorkerId
from coppice.seals import SEAL_BYTES, ChainKey
from coppice_cache.core.base.events import Cleared, IndexEvent, Removed, Stored, Tier
from coppice_cache.edge.durability import log_codec
from coppice_cache.edge.durability.log_codec import CorruptLog, LogKeys, open_record, seal_record

KEYS = LogKeys.derive(b"k" * 32)
STREAM = b"s" * 16
CONTEXT = (WorkerId("w0"), WorkerEpoch(7 << 32 | 1), DomainId("amber"), Namespace(b"model-a"))
CHAIN_KEY = ChainKey(b"secret of a tree", b"its proof")
CANARY = b"canary words of a prompt"


FIRST = 4  # version that counts as released
RECORDS = Path(__file__).with_name("log_records.json")  # the golden events at place 2 of the stream, by version
GOLDEN = {int(version): record for version, record in json.loads(RECORDS.read_text()).items()}
VERSIONS = sorted(GOLDEN)


def stored(count: int = 2, tokens: bytes = CANARY, parent: bytes = b"") -> Stored:
    run = tokens * 8 * count
    seals = b"s" * SEAL_BYTES * count
    return Stored(*CONTEXT, parent, run, b"h" * HANDLE_BYTES * count, seals, chain_key=CHAIN_KEY)


def golden_events() -> list[IndexEvent]:
    removed = Removed(*CONTEXT, b"h" * HANDLE_BYTES, b"s" * SEAL_BYTES, Tier.HOST, True)
    return [stored(), stored(1, parent=b"p" * SEAL_BYTES), removed, Cleared(*CONTEXT)]


@st.composite
def events(draw: st.DrawFn) -> IndexEvent:
    context = (
        WorkerId(draw(st.sampled_from(["w0", "w1"]))),
        WorkerEpoch(draw(st.integers(0, (1 << 64) - 1))),
        DomainId(draw(st.sampled_from(["", "amber", "\0x", "büche"]))),
        Namespace(draw(st.binary(max_size=8))),
    )
    count = draw(st.integers(1, 3))
    handles, seals = draw(st.binary(min_size=8 * count, max_size=8 * count)), bytes(SEAL_BYTES * count)
    tier = draw(st.sampled_from(Tier))
    match draw(st.sampled_from([Stored, Removed, Cleared])):
        case kind if kind is Stored:
            parent = draw(st.sampled_from([b"", b"p" * SEAL_BYTES]))
            tokens, key = draw(st.binary(min_size=4, max_size=4)) * count, ChainKey(context[2].encode(), context[3])
            return Stored(*context, parent, tokens, handles, seals, tier, key)
        case kind if kind is Removed:
            return Removed(*context, handles, seals, tier, draw(st.booleans()))
        case _:
            return Cleared(*context)


@settings(max_examples=60, deadline=None)
@given(st.lists(events(), max_size=6), st.integers(0, 1 << 40))
def test_what_is_sealed_is_opened_again(some: list[IndexEvent], index: int) -> None:
    assert open_record(KEYS, STREAM, index, seal_record(KEYS, STREAM, index, some)) == some


def test_nothing_of_it_can_be_read() -> None:
    record = seal_record(KEYS, STREAM, 0, [stored()])
    for secret in (CANARY, CANARY[:8], b"amber", b"model-a", b"w0"):
        assert secret not in record
    again = seal_record(KEYS, STREAM, 1, [stored()])
    assert record[8:-16] != again[8:-16], "the same events at another place look different"


def test_a_record_is_aes_256_gcm_under_a_key_of_its_stream() -> None:
    record = seal_record(KEYS, STREAM, 5, [stored()])
    secret = blake2b(key=b"k" * 32, digest_size=32, person=b"coppice.log.key").digest()
    key = blake2b(STREAM, key=secret, digest_size=32).digest()
    payload = AESGCM(key).decrypt((5).to_bytes(12, "little"), record[8:], record[:8])
    assert CANARY in payload


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_one_changed_byte_is_noticed(data: st.DataObject) -> None:
    record = bytearray(seal_record(KEYS, STREAM, 3, [stored(1)]))
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptLog, match="record 3"):
        open_record(KEYS, STREAM, 3, bytes(record))


def test_a_changed_header_is_noticed() -> None:
    record = bytearray(seal_record(KEYS, STREAM, 3, [stored(1)]))
    record[3] ^= 1  # nothing but the tag speaks for this byte
    with pytest.raises(CorruptLog, match="was changed"):
        open_record(KEYS, STREAM, 3, bytes(record))


@pytest.mark.parametrize("cut", [0, 1, 8, 23, 24, -1])
def test_a_cut_record_is_noticed(cut: int) -> None:
    with pytest.raises(CorruptLog):
        open_record(KEYS, STREAM, 0, seal_record(KEYS, STREAM, 0, [stored()])[:cut])


def test_a_record_counts_at_its_own_place_under_its_own_key_only() -> None:
    record = seal_record(KEYS, STREAM, 4, [stored()])
    with pytest.raises(CorruptLog):
        open_record(KEYS, STREAM, 5, record)
    with pytest.raises(CorruptLog):
        open_record(KEYS, b"t" * 16, 4, record)
    with pytest.raises(CorruptLog, match="another seal key"):
        open_record(LogKeys.derive(b"j" * 32), STREAM, 4, record)


@pytest.mark.parametrize("other", [min(VERSIONS) - 1, max(VERSIONS) + 1])
def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch, other: int) -> None:
    monkeypatch.setattr(log_codec, "VERSION", other)
    record = seal_record(KEYS, STREAM, 0, [])
    monkeypatch.undo()
    with pytest.raises(CorruptLog, match=f"version {other}; this service reads version {VERSIONS[0]}"):
        open_record(KEYS, STREAM, 0, record)


def test_the_version_that_is_written_and_the_one_before_have_golden_records() -> None:
    """A version that was released stays, and its record too, until the version after the next one."""
    assert sorted(GOLDEN) == [version for version in (log_codec.VERSION - 1, log_codec.VERSION) if version >= FIRST]
    assert seal_record(KEYS, STREAM, 2, golden_events()).hex() == GOLDEN[log_codec.VERSION], "a new version, then"


@pytest.mark.parametrize("version", VERSIONS)
def test_what_was_written_is_read(version: int) -> None:
    assert open_record(KEYS, STREAM, 2, bytes.fromhex(GOLDEN[version])) == golden_events()


WRONG: dict[str, object] = {
    "no pair": [1],
    "no list": [[["w", 1, "d", b""]], 5],
    "an unknown kind": [[["w", 1, "d", b""]], [[9, 0]]],
    "an unknown context": [[], [[2, 0]]],
    "a context of other types": [[[b"w", 1, "d", b""]], []],
    "too few fields": [[["w", 1, "d", b""]], [[0, 0, 0]]],
    "handles that are cut": [[["w", 1, "d", b""]], [[1, 0, 0, b"1234567", b""]]],
    "too few seals": [[["w", 1, "d", b""]], [[1, 0, 0, b"12345678", b"s" * 15]]],
    "no tokens": [[["w", 1, "d", b""]], [[0, 0, 0, b"", b"", b"12345678", b"s" * 16]]],
    "half a token": [[["w", 1, "d", b""]], [[0, 0, 0, b"", b"123456", b"12345678", b"s" * 16]]],
    "half a parent": [[["w", 1, "d", b""]], [[0, 0, 0, b"p", b"1234", b"12345678", b"s" * 16]]],
    "an unknown tier": [[["w", 1, "d", b""]], [[1, 0, 7, b"12345678", b"s" * 16]]],
}


@pytest.mark.parametrize("payload", WRONG.values(), ids=WRONG.keys())
def test_authentic_nonsense_is_refused_by_name(payload: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_codec, "_pack", lambda events: msgpack.packb(payload))
    with pytest.raises(CorruptLog, match="record 0"):
        open_record(KEYS, STREAM, 0, seal_record(KEYS, STREAM, 0, []))
