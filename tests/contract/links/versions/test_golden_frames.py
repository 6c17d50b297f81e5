"""What stands on the wire, byte for byte, in the newest version of the session protocol and in the one before it.

`python -m tests.fakes.messages.golden` writes the newest version's files anew. A version that was released
stays as it is: what comes after it is the next one (docs/decisions/0049-versions.md).
"""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest

from coppice.edge.codec import Codec
from coppice.messages import index
from coppice.session.versions import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, SPOKEN
from tests.fakes.message_values import CODECS, fields, golden_values, is_record, members, plain
from tests.fakes.messages import golden
from tests.fakes.messages.golden import SESSIONS
from tests.fakes.messages.shapes import ALTERNATIVE, RUN

GOLDEN = golden.frames_of(PROTOCOL_VERSION) | json.loads((golden.FOLDER / golden.DOORS).read_text())
VALUES = {name: golden_values(codec) for name, codec in CODECS.items()}
CASES = [(channel, message) for channel, found in VALUES.items() for message in found]
LAST = golden.frames_of(PROTOCOL_VERSION_MIN)
LAST_CASES = [(channel, message) for channel, found in LAST.items() for message in found]
LAST_RECORDS, LAST_ENUMS = golden.shapes_of(PROTOCOL_VERSION_MIN)
RECORDS, ENUMS = golden.shapes_of(PROTOCOL_VERSION)

# Values of enums that the last version does not have, and the function that asks a link's version before it says one.
ASKED_FOR: dict[tuple[str, str], str] = {
    ("Direction", "store"): "registration: a worker that reports no blocks of a disk has no tier to store to",
    ("Direction", "load"): "registration: nor one to load from",
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


# ---- beside the version before ----


def test_the_files_are_those_of_the_versions_that_are_spoken() -> None:
    assert {path.name for path in golden.FOLDER.glob("v*")} == {f"v{PROTOCOL_VERSION_MIN}", f"v{PROTOCOL_VERSION}"}
    assert (SPOKEN.lowest, SPOKEN.highest) == (PROTOCOL_VERSION_MIN, PROTOCOL_VERSION)
    assert golden.shapes() == {"records": RECORDS, "enums": ENUMS}, "the wire changed; see the top of this file"


@pytest.mark.parametrize(("channel", "message"), LAST_CASES, ids=lambda part: part.replace(" ", "-"))
def test_what_the_last_version_says_is_understood(channel: str, message: str) -> None:
    frame = bytes.fromhex(LAST[channel][message])
    heard, value = CODECS[channel].decode(frame), VALUES[channel][message]
    older = golden.older_codec(channel, PROTOCOL_VERSION_MIN)
    assert older.encode(heard) == frame
    assert older.encode(value) == frame, "its fields must stand where they stood"


@pytest.mark.parametrize("channel", SESSIONS)
def test_records_have_further_fields_at_their_end_alone_and_do_without_them(channel: str) -> None:
    types = record_types(CODECS[channel].kinds)
    for record, last in LAST_RECORDS[channel].items():
        now = list(RECORDS[channel][record].items())
        for (name, holds), (name_now, holds_now) in zip(last.items(), now, strict=False):
            assert name_now == name, f"{record}.{name} of the last version has another place"
            assert is_no_less(holds_now, holds), f"{record}.{name} held {holds}"
        kept = [field.name for field in msgspec.structs.fields(types[record])[len(last) :] if field.required]
        assert len(now) >= len(last), f"{record} has lost fields"
        assert not kept, f"{record} of the last version is not understood: it has no {kept}"


@pytest.mark.parametrize("channel", SESSIONS)
def test_a_message_that_the_last_version_does_not_have_says_since_when_it_is_there(channel: str) -> None:
    for name, record in record_types(CODECS[channel].kinds).items():
        if record.__struct_config__.tag:
            assert (record.SINCE == PROTOCOL_VERSION) == (name not in LAST_RECORDS[channel]), name


def test_a_value_that_the_last_version_does_not_have_is_asked_for() -> None:
    new = {(name, value) for name, values in ENUMS.items() for value in values if name in LAST_ENUMS}
    old = {(name, value) for name, values in LAST_ENUMS.items() for value in values}
    assert new - old == set(ASKED_FOR), "see docs/decisions/0049-versions.md"
    assert old <= new, "a value went that the last version says"


def is_no_less(now: str, last: str) -> bool:
    """What it held, and maybe further messages."""
    if now.startswith(RUN) != last.startswith(RUN):
        return False
    return set(last.removeprefix(RUN).split(ALTERNATIVE)) <= set(now.removeprefix(RUN).split(ALTERNATIVE))


def record_types(kind: Any) -> dict[str, Any]:
    """Every record in messages of `kind`, by its name."""
    kind, _ = plain(kind)
    if not is_record(kind):
        inner = get_args(kind)
        return {name: found for part in inner for name, found in record_types(part).items()}
    record = getattr(kind, "__origin__", kind)
    found = {name: one for hint in fields(kind).values() for name, one in record_types(hint).items()}
    return {record.__name__: record} | found
