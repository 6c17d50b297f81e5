"""The KV event format of the field: what vLLM and SGLang say is understood, and no bytes break the reader."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given, settings

from coppice.edge.kv_events import frames
from coppice.edge.kv_events import payloads as codec
from coppice.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEventBatch, UnknownEvent

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
MAYBE_TEXT = st.none() | TEXT
SMALL = st.none() | st.integers(0, 100)
HASH = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=32, max_size=32)
EXTRA = st.none() | st.lists(TEXT | st.binary(max_size=4) | st.tuples(TEXT, st.integers(0, 9)), max_size=2).map(tuple)


def packed(*ids: int) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    hashes = tuple(draw(st.lists(HASH, max_size=3)))
    size = draw(st.integers(1, 4))
    ids = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size * len(hashes), max_size=size * len(hashes)))
    per_block = st.lists(EXTRA, min_size=len(hashes), max_size=len(hashes)).map(tuple)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=draw(st.none() | HASH),
        tokens=packed(*ids),
        block_size=size,
        lora_id=draw(SMALL),
        medium=draw(MAYBE_TEXT),
        lora_name=draw(MAYBE_TEXT),
        extra_keys=draw(st.none() | per_block),
        group_idx=draw(SMALL),
        kv_cache_spec_kind=draw(MAYBE_TEXT),
        kv_cache_spec_sliding_window=draw(SMALL),
        locality=draw(MAYBE_TEXT),
        ownership=draw(MAYBE_TEXT),
        session_id=draw(MAYBE_TEXT),
        lookahead=draw(st.none() | st.just(tuple(packed(7) for _ in hashes))),
    )


REMOVED = st.builds(
    BlockRemoved, st.lists(HASH, max_size=3).map(tuple), MAYBE_TEXT, SMALL, MAYBE_TEXT, ownership=MAYBE_TEXT
)
BATCHES = st.builds(
    KvEventBatch,
    st.floats(0, 2e9),
    st.lists(stored() | REMOVED | st.just(AllBlocksCleared()), max_size=3).map(tuple),
    SMALL,
)


@settings(max_examples=150, deadline=None)
@given(BATCHES, st.sampled_from(["map", "array"]))
def test_every_batch_survives_the_wire_in_both_forms(batch: KvEventBatch, form: Any) -> None:
    assert codec.decode_batch(codec.encode_batch(batch, form)) == batch


def test_a_map_as_vllm_sends_it() -> None:
    event = {
        "type": "BlockStored",
        "block_hashes": [15760518052499183552],
        "parent_block_hash": None,
        "token_ids": [151644, 872],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "a_field_of_next_year": {"x": 1},
    }
    batch = codec.decode_batch(msgpack.packb([1789095808.8, [event], 0]))
    assert batch == KvEventBatch(
        1789095808.8,
        (
            BlockStored(
                (15760518052499183552,),
                None,
                packed(151644, 872),
                2,
                medium="GPU",
                extra_keys=(None,),
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            ),
        ),
        0,
    )


def test_what_is_written_is_what_vllm_writes() -> None:
    batch = KvEventBatch(1.5, (BlockStored((7,), None, packed(1, 2), 2, medium="GPU"), AllBlocksCleared()), 0)
    assert msgpack.unpackb(codec.encode_batch(batch)) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [7],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]
    assert msgpack.unpackb(codec.encode_batch(batch, "array"))[1] == [
        ["BlockStored", [7], None, [1, 2], 2, None, "GPU"],
        ["AllBlocksCleared"],
    ]


def test_what_sglang_sends() -> None:
    salted = {
        "type": "BlockStored",
        "block_hashes": [-484813614762822561],
        "parent_block_hash": -3,
        "token_ids": [5, 6],
        "block_size": 2,
        "lora_id": None,
        "cache_salt": "blue",
    }
    old = ["BlockStored", [-1], None, [1, 2], 2, None]
    batch = codec.decode_batch(msgpack.packb([2, [salted, old, ["BlockRemoved", [-1]], ["AllBlocksCleared"]], None]))
    assert batch.events == (
        BlockStored((-484813614762822561,), -3, packed(5, 6), 2, cache_salt="blue"),
        BlockStored((-1,), None, packed(1, 2), 2),
        BlockRemoved((-1,)),
        AllBlocksCleared(),
    )


def test_bigram_keys_become_tokens_and_the_one_beyond() -> None:
    pairs = [[1, 2], [2, 3], [3, 4], [4, 5]]
    event = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": pairs, "block_size": 2}
    (read,) = codec.decode_batch(msgpack.packb([0.0, [event]])).events
    assert read == BlockStored((1, 2), None, packed(1, 2, 3, 4), 2, lookahead=(packed(3), packed(5)))


def test_a_batch_that_is_a_map_and_an_event_of_the_future() -> None:
    wire = {"ts": 1.0, "events": [{"type": "BlockMigrated", "block_hashes": [1]}], "data_parallel_rank": 3}
    assert codec.decode_batch(msgpack.packb(wire)) == KvEventBatch(1.0, (UnknownEvent("BlockMigrated"),), 3)
    with pytest.raises(ValueError, match="BlockMigrated"):
        codec.encode_batch(KvEventBatch(1.0, (UnknownEvent("BlockMigrated"),)))


def test_typed_extra_keys_of_a_later_schema() -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [4], "block_size": 1}
    event["extra_keys"] = [[{"type": "cache_salt", "salt": "blue"}]]
    (read,) = codec.decode_batch(msgpack.packb([0.0, [event]])).events
    assert isinstance(read, BlockStored)
    assert read.extra_keys == (((("salt", "blue"), ("type", "cache_salt")),),)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def one(**fields: Any) -> Any:
    return [0.0, [{"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1} | fields]]


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        ("text", "the payload is text"),
        ([1.0], "the payload is an array of 1"),
        (["x", []], "the time of the batch is text"),
        ([float("nan"), []], "the time of the batch is nan"),
        ([1.0, {}], "the events are a map"),
        ([1.0, [], "a"], "data-parallel rank is text"),
        ([1.0, [], -1], "data-parallel rank is -1"),
        ([1.0, [7]], "event 0: is an integer"),
        ([1.0, [[]]], "event 0: is an array of 0"),
        ([1.0, [{}]], "event 0: its type is missing"),
        ([1.0, [{"type": "AllBlocksCleared"}, ["BlockRemoved", 5]]], "event 1: block_hashes is an integer"),
        (one(block_size=0), "block_size is 0"),
        (one(block_size="a"), "block_size is text"),
        (one(block_hashes=[1.5]), "a block hash is a number"),
        (one(block_hashes=[b""]), "a block hash is bytes of 0"),
        (one(parent_block_hash="x"), "a block hash is text"),
        (one(token_ids=[-1]), "token id is no unsigned"),
        (one(token_ids=[2**32]), "token id is no unsigned"),
        (one(token_ids=["a"]), "token id is no unsigned"),
        (one(token_ids=[[1, 2, 3]]), "pairs of shape"),
        (one(token_ids=[[1, -2]]), "token id is no unsigned"),
        (one(token_ids=[[1, 2], [1]]), "pairs that are none"),
        (one(lookahead_token_ids=[]), "lookahead_token_ids is an array of 0"),
        (one(lora_id="x"), "lora_id is text"),
        (one(medium=3), "medium is an integer"),
        (one(extra_keys=[None, None]), "extra_keys is an array of 2"),
        (one(extra_keys=["salt"]), "an entry of extra_keys"),
        (one(extra_keys=[nested(9)]), "nested deeper"),
    ],
)
def test_what_is_malformed_is_named(wire: Any, says: str) -> None:
    with pytest.raises(codec.MalformedEvents, match=says):
        codec.decode_batch(msgpack.packb(wire))


def test_sizes_are_bounded() -> None:
    payload = codec.encode_batch(KvEventBatch(1.0, (BlockStored((1,), None, bytes(400), 100),)))
    with pytest.raises(codec.MalformedEvents, match="at most 100 are read"):
        codec.decode_batch(payload, max_bytes=100)
    with pytest.raises(codec.MalformedEvents, match="not the msgpack of one batch"):
        codec.decode_batch(msgpack.packb([1.0, [{"type": "x" * (codec.MAX_TEXT_BYTES + 1)}]]))
    with pytest.raises(codec.MalformedEvents, match="not the msgpack of one batch"):
        codec.decode_batch(b"\x91" * 5_000 + b"\x01")  # nested without an end
    with pytest.raises(codec.MalformedEvents, match="not the msgpack of one batch"):
        codec.decode_batch(b"\x92\x01\xdd\xff\xff\xff\xff")  # an array that claims four thousand million events


WILD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
KEYS = [*codec._STORED_FIELDS, "cache_salt"]
NEARLY = st.dictionaries(st.sampled_from(KEYS), WILD, max_size=8).map(lambda d: d | {"type": "BlockStored"})


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=64)
    | WILD.map(msgpack.packb)
    | st.lists(NEARLY | WILD, max_size=3).map(lambda events: msgpack.packb([1.0, events, 0]))
    | st.lists(st.lists(WILD, max_size=9).map(lambda a: ["BlockStored", *a]), max_size=2).map(
        lambda events: msgpack.packb([1.0, events])
    )
)
def test_no_bytes_break_the_reader(payload: bytes) -> None:
    try:
        batch = codec.decode_batch(payload)
    except codec.MalformedEvents:
        return
    assert all(len(event.tokens) % 4 == 0 for event in batch.events if isinstance(event, BlockStored))


@settings(max_examples=60, deadline=None)
@given(BATCHES, st.data())
def test_a_flipped_byte_is_read_or_named(batch: KvEventBatch, data: st.DataObject) -> None:
    payload = bytearray(codec.encode_batch(batch))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(codec.MalformedEvents):
        codec.decode_batch(bytes(payload))


def test_frames_of_a_publisher() -> None:
    sent = frames.event_frames("kv@pod-1@llama", 258, b"x")
    assert sent == [b"kv@pod-1@llama", b"\0\0\0\0\0\0\1\2", b"x"]
    assert frames.read_event_frames(sent) == frames.EventFrame("kv@pod-1@llama", 258, b"x")


def test_frames_of_a_replay() -> None:
    assert frames.replay_request(3) == [b"", b"\0\0\0\0\0\0\0\3"]
    asked = frames.read_replay_request([b"id", *frames.replay_request(3)])
    assert asked == frames.ReplayRequest(b"id", 3)
    answer = frames.replay_answer(b"id", "t", 3, b"x")
    assert frames.read_replay_answer(answer[1:]) == frames.EventFrame("t", 3, b"x")
    assert frames.read_replay_answer([b"", answer[3], b"x"]) == frames.EventFrame(None, 3, b"x")
    end = frames.replay_end(b"id")
    assert end == [b"id", b"", b"", b"\xff" * 8, b""]
    assert frames.read_replay_answer(end[1:]) == frames.ReplayEnd()
    assert frames.read_replay_answer([b"", b"\xff" * 8, b""]) == frames.ReplayEnd()


@pytest.mark.parametrize(
    "parts", [[], [b"t"], [b"t", b"12345678"], [b"t", b"1", b"x"], [b"\xff", bytes(8), b""], [b"t", b"\xff" * 8, b"x"]]
)
def test_frames_that_are_none(parts: list[bytes]) -> None:
    with pytest.raises(codec.MalformedEvents):
        frames.read_event_frames(parts)
    with pytest.raises(codec.MalformedEvents):
        frames.read_replay_request(parts)


@pytest.mark.parametrize(
    "parts", [[], [b""], [b"x", bytes(8), b""], [b"", b"123", b""], [b"", b"t" * 2000, bytes(8), b""]]
)
def test_replay_answers_that_are_none(parts: list[bytes]) -> None:
    with pytest.raises(codec.MalformedEvents):
        frames.read_replay_answer(parts)
