"""What stands on the wire, byte for byte: a frame of each message, as older and younger processes write it.

`python -m tests.contract.links.test_golden_frames` writes the file anew. A frame that changes is another protocol:
raise PROTOCOL_VERSION, unless a field with a default was put at the end of a record.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from coppice.edge.codec import Codec
from coppice.messages import index
from tests.fakes.message_values import CODECS, golden_values, members

FILE = Path(__file__).with_name("golden_frames.json")
GOLDEN: dict[str, dict[str, str]] = json.loads(FILE.read_text())
VALUES = {name: golden_values(codec) for name, codec in CODECS.items()}
CASES = [(channel, message) for channel, found in VALUES.items() for message in found]


def encoded() -> dict[str, dict[str, str]]:
    return {
        channel: {name: CODECS[channel].encode(value).hex() for name, value in found.items()}
        for channel, found in VALUES.items()
    }


def test_every_message_has_a_golden_frame_and_none_is_left_over() -> None:
    assert {channel: set(found) for channel, found in GOLDEN.items()} == {
        channel: set(found) for channel, found in VALUES.items()
    }


@pytest.mark.parametrize(("channel", "message"), CASES, ids=lambda part: part.replace(" ", "-"))
def test_it_is_written_and_read_as_ever(channel: str, message: str) -> None:
    codec, value = CODECS[channel], VALUES[channel][message]
    assert codec.encode(value).hex() == GOLDEN[channel][message], "the wire changed; see the top of this file"
    assert codec.decode(bytes.fromhex(GOLDEN[channel][message])) == value


def kinds_of(codec: Codec[Any]) -> set[str]:
    """Names of the messages in the union, and of the bodies of `Data`."""
    return {
        f"Data({body.__name__})" if get_args(kind) else kind.__name__
        for kind in members(codec.kinds)
        for body in (members(get_args(kind)[0]) if get_args(kind) else (kind,))
    }


@pytest.mark.parametrize("channel", CODECS)
def test_no_member_of_a_union_is_left_out(channel: str) -> None:
    wanted = kinds_of(CODECS[channel])
    batches = {"OpBatch": index.Op, "AnswerBatch": index.Answer}
    for name, union in batches.items():
        if f"Data({name})" in wanted:
            wanted.remove(f"Data({name})")
            wanted |= {f"Data({name}({member.__name__}))" for member in get_args(union)}
    assert {name.replace("(Refusal)", "") for name in VALUES[channel]} == wanted


if __name__ == "__main__":
    FILE.write_text(json.dumps(encoded(), indent=1) + "\n")
