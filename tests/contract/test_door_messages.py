"""What crosses between the planner's process and a front door: every message there and back, and nothing else."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.ids import DomainId, SequenceId
from coppice.messages.index import Reuse
from coppice.messages.step import SamplingParams, TokenLogprobs
from coppice_scheduler.core.state.request import (
    Finish,
    Output,
    OutputError,
    OutputErrorCode,
    Refused,
    RefusedReason,
    Request,
    SchedulerStats,
    TenantStats,
    TokenBatch,
)
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.ipc import door_messages
from coppice_scheduler.edge.ipc.door_messages import (
    MAX_FRAME_BYTES,
    Asks,
    Beat,
    Cancel,
    CannotServe,
    FrameError,
    FrameReader,
    Message,
    PlannerState,
    RefusedRequest,
    Serving,
    Start,
    Stop,
    Turn,
    to_frame,
)

REQUEST = Request(
    "r",
    "tenant",
    DomainId("d"),
    bytes(range(8)),
    SamplingParams(0.5, 3, 0.9, 2**64 - 1, logit_bias=b"\x01" * 8, num_logprobs=2),
    7,
    frozenset({1, 2**32 - 1}),
    -3,
    2**62,
    "00-aa-bb-01",
    2**32 - 1,
    False,
    True,
    2**62,
    "other",
    Reuse.LIKELY,
    1000,
)
LAST = Output(
    "r",
    b"\x01\x00\x00\x00",
    Finish.ERROR,
    OutputError(OutputErrorCode.WORKER_LOST, "it died", 5),
    1,
    2,
    3,
    b"\x02\x00\x00\x00",
    (("queue", 1, 2), ("decode", 2, 3)),
    (TokenLogprobs(SequenceId(4), 9, 1, b"\x00" * 4, b"\x01" * 4, b"\x02" * 4),),
    6,
)
STATS = SchedulerStats(1, 2, 3, 4, {"t": TenantStats(1, 0)}, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
EVERY_MESSAGE: list[Message] = [
    Start(3, '{"model": "m"}', ModelInfo("m", 10, 11, 12), "folder"),
    PlannerState(True, False, STATS),
    Turn(
        (RefusedRequest("x", Refused(RefusedReason.QUEUE_FULL, "full", 9)),),
        (TokenBatch(b"\x01" * 8, b"\x02" * 8),),
        (LAST, Output("s", b"")),
    ),
    Stop(),
    Serving(),
    CannotServe(2, "what", "hint"),
    Asks((REQUEST,), (Cancel("r", Finish.STOP),)),
    Beat(),
]


def test_every_message_is_there() -> None:
    assert [type(message) for message in EVERY_MESSAGE] == list(door_messages._KINDS)


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: type(message).__name__)
def test_there_and_back(message: Message) -> None:
    assert list(FrameReader().feed(to_frame(message))) == [message]


@given(st.lists(st.integers(1, 400), max_size=30))
def test_frames_come_in_any_pieces(sizes: list[int]) -> None:
    stream = b"".join(map(to_frame, EVERY_MESSAGE))
    reader = FrameReader()
    found = []
    for size in sizes:
        piece, stream = stream[:size], stream[size:]
        found += list(reader.feed(piece))
    assert found + list(reader.feed(stream)) == EVERY_MESSAGE


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (struct.pack("<I", MAX_FRAME_BYTES + 1), "at most"),
        (frame(b"\xc1"), "no msgpack"),
        (frame(b"\x93\x01"), "no msgpack"),
        (frame(b"\xdd\xff\xff\xff\xff"), "no msgpack"),
        (frame(b"\x91" * 5000 + b"\x01"), "no msgpack"),
        (frame(msgpack.packb(7)), "kind, fields"),
        (frame(msgpack.packb([1])), "kind, fields"),
        (frame(msgpack.packb([99, []])), "unknown kind"),
        (frame(msgpack.packb(["x", []])), "unknown kind"),
        (frame(msgpack.packb([6, [[["r"]], []]])), "1 values where Request has"),
        (frame(msgpack.packb([5, [2, "what"]])), "2 values where CannotServe has 3"),
    ],
)
def test_anything_else_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(FrameError, match=words):
        list(FrameReader().feed(raw))


@given(st.recursive(st.none() | st.integers(-5, 9) | st.binary(max_size=4), lambda inner: st.lists(inner, max_size=4)))
def test_no_frame_breaks_the_reader(body: Any) -> None:
    try:
        list(FrameReader().feed(frame(msgpack.packb(body))))
    except FrameError:
        pass
