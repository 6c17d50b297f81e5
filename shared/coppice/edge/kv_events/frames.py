"""The ZMQ frames around KV events, for both ends. Payloads are `coppice.edge.kv_events.payloads`.

    PUB     [topic, sequence, payload]                   sequence: 8 bytes, big endian, from 0
    ROUTER  <- ["", sequence]                            please send again from this one on
            -> ["", topic, sequence, payload] ...        older engines leave the topic out
            -> ["", "", -1, ""]                          that was all

Whoever asks is a DEALER that sends the empty delimiter itself: a REQ socket would take one answer only. Engines drop a
request that is not [identity, "", sequence]. Read from vLLM 0.33 and SGLang 0.5.23, `ZmqEventPublisher`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coppice.edge.kv_events.payloads import MalformedEvents

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
MAX_TOPIC_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class EventFrame:
    """One message as it came: its payload is not read yet. topic is None where an older engine left it out."""

    topic: str | None
    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReplayEnd:
    """The publisher has sent again what it still had."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """identity: the frame that a ROUTER puts in front; answers go back under it."""

    identity: bytes
    start: int


def event_frames(topic: str, sequence: int, payload: bytes) -> list[bytes]:
    """What a PUB socket sends."""
    return [topic.encode(), _sequence_bytes(sequence), payload]


def read_event_frames(frames: Sequence[bytes]) -> EventFrame:
    """What a SUB socket got. Raises MalformedEvents."""
    if len(frames) != 3:
        raise MalformedEvents(f"the message has {len(frames)} frames; topic, sequence and payload are expected")
    return EventFrame(_read_topic(frames[0]), _read_sequence(frames[1]), frames[2])


def replay_request(start: int) -> list[bytes]:
    """What a DEALER sends to ask for everything from `start` on."""
    return [b"", _sequence_bytes(start)]


def read_replay_request(frames: Sequence[bytes]) -> ReplayRequest:
    """What a ROUTER got. Raises MalformedEvents."""
    if len(frames) != 3 or frames[1]:
        raise MalformedEvents("a replay request is its sender, an empty frame and a sequence")
    return ReplayRequest(frames[0], _read_sequence(frames[2]))


def replay_answer(identity: bytes, topic: str, sequence: int, payload: bytes) -> list[bytes]:
    """What a ROUTER sends for one message."""
    return [identity, b"", *event_frames(topic, sequence, payload)]


def replay_end(identity: bytes) -> list[bytes]:
    """What a ROUTER sends last."""
    return [identity, b"", b"", END_OF_REPLAY, b""]


def read_replay_answer(frames: Sequence[bytes]) -> EventFrame | ReplayEnd:
    """What a DEALER got, with a topic or without. Raises MalformedEvents."""
    if len(frames) not in (3, 4) or frames[0]:
        raise MalformedEvents(
            f"a replay answer has {len(frames)} frames; an empty one, a topic, a sequence and a payload are expected"
        )
    sequence, payload = frames[-2:]
    if sequence == END_OF_REPLAY:
        return ReplayEnd()
    return EventFrame(_read_topic(frames[1]) if len(frames) == 4 else None, _read_sequence(sequence), payload)


def _sequence_bytes(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def _read_sequence(frame: bytes) -> int:
    if len(frame) != SEQUENCE_BYTES:
        raise MalformedEvents(f"the sequence has {len(frame)} bytes instead of {SEQUENCE_BYTES}")
    sequence = int.from_bytes(frame, "big")
    if sequence >> 63:
        raise MalformedEvents("the sequence is negative")
    return sequence


def _read_topic(frame: bytes) -> str:
    if len(frame) > MAX_TOPIC_BYTES:
        raise MalformedEvents(f"the topic has {len(frame)} bytes; at most {MAX_TOPIC_BYTES} are read")
    try:
        return frame.decode()
    except UnicodeDecodeError as error:
        raise MalformedEvents("the topic is not UTF-8") from error
