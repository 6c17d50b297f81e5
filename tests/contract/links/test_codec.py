"""Every message comes back as it went, and nothing else is taken: not other bytes, types, numbers, lengths or ends."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from coppice.edge.codec import INDEX, STEPS, Codec, MalformedFrame
from coppice.ids import CacheEpoch, DomainId, LeaseId, Namespace, SequenceId
from coppice.messages.index import Acquire, Extend, LeaseDigest, MatchQueries, MatchQuery, OpBatch, Publish, Wake
from coppice.messages.step import Growth, SamplingParams, SequenceStart, StepPlan, StepResult
from coppice.session.frames import Data, Hello, Reject, RejectCode
from tests.fakes.message_values import CODECS, U64_MAX, values

LEASE = LeaseId(bytes(16))
OP = Acquire(LEASE, DomainId("d"), Namespace(b""), b"1234", 1, ())
CHECKED = settings(max_examples=150, deadline=None, database=None)


def there_and_back(codec: Codec[Any], message: Any) -> Any:
    return codec.decode(codec.encode(message))


def as_lists(message: Any) -> list[Any]:
    found: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return found


@pytest.mark.parametrize("channel", CODECS)
def test_a_message_comes_back_as_it_went(channel: str) -> None:
    codec = CODECS[channel]

    @CHECKED
    @given(values(codec.kinds))
    def check(message: Any) -> None:
        found = there_and_back(codec, message)
        assert found == message
        assert type(found) is type(message)

    check()


@CHECKED
@given(st.sampled_from(sorted(CODECS)), st.binary(max_size=60))
def test_bytes_at_random_are_malformed_or_a_message(channel: str, data: bytes) -> None:
    try:
        CODECS[channel].decode(data)
    except MalformedFrame:
        pass


def batch_with(place: int, value: Any) -> list[Any]:
    """The batch of one Acquire, with another value at `place` of its array."""
    data = as_lists(Data(1, 1, 0, OpBatch((OP,))))
    data[4][1][0][place] = value
    return data


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        ([], "at least length 1"),
        (["Nobody", 1], "Invalid value"),
        (["Data", 1, 1, 0, ["Wake", 1, []]], "Invalid value"),
        (["Data", 1, 1, 0], "at least length 5"),
        (["Data", -1, 1, 0, ["OpBatch", []]], ">= 0"),
        (["Data", 1.5, 1, 0, ["OpBatch", []]], "got `float`"),
        (["Data", True, 1, 0, ["OpBatch", []]], "got `bool`"),
        (["Data", 1, 1, 0, ["OpBatch", None]], "got `None`"),
        (batch_with(1, bytes(15)), "length >= 16"),
        (batch_with(1, bytes(17)), "length <= 16"),
        (batch_with(2, b"d"), "got `bytes`"),
        (batch_with(4, b"123"), "Acquire.tokens has 3 bytes; its items have 4 each"),
        (batch_with(5, -1), ">= 0"),
        (batch_with(8, "never"), "Invalid enum value"),
        (batch_with(9, 1), "got `int`"),
        (["Data", 1, 1, 0, ["OpBatch", [["Distrust", bytes(16), bytes(9)]]]], "Distrust.handles has 9 bytes"),
        (["Data", 1, 1, 0, ["MatchQueries", [["d", b"", b"1"]]]], "MatchQuery.tokens has 1 bytes"),
    ],
)
def test_what_does_not_fit_is_named(wire: list[Any], words: str) -> None:
    with pytest.raises(MalformedFrame, match=words):
        INDEX.from_client.decode(msgspec.msgpack.encode(wire))


START = SequenceStart(SequenceId(1), LEASE, b"1234", 0, b"", b"", b"", SamplingParams())


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (StepPlan(1, detach=b"123"), "StepPlan.detach has 3"),
        (StepPlan(1, seals=bytes(8)), "StepPlan.seals has 8"),
        (StepPlan(1, grow=(Growth(SequenceId(1), bytes(8)), Growth(SequenceId(2), bytes(4)))), "Growth.owned has 4"),
        (
            StepPlan(1, attach=(msgspec.structs.replace(START, sampling=SamplingParams(logit_bias=bytes(12))),)),
            "SamplingParams.logit_bias has 12",
        ),
        (StepPlan(1, grow=(Growth(SequenceId(1 << 32), b""),)), "<= 4294967295"),
    ],
)
def test_what_was_made_wrong_is_not_read(plan: StepPlan, words: str) -> None:
    with pytest.raises(MalformedFrame, match=words):
        there_and_back(STEPS.from_client, Data(1, 1, 0, plan))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # an array of four billion
        b"\x92\xa5Hello\xc6\xff\xff\xff\xff",  # four billion bytes
        b"\x92\xa5Hello\xd9\x02\xff\xfe",  # no UTF-8
        msgspec.msgpack.encode(["Heartbeat", 1, 2])[:-1] + b"\x02" + b"\x91" * 100_000,
        msgspec.msgpack.encode(["Heartbeat", 1, 2]) + b"\x00",
        b"\x95" + msgspec.msgpack.encode(["Heartbeat", 1, 2])[1:] + b"\x91" * 100_000,  # deep, where nobody looks
    ],
)
def test_bytes_that_would_cost_much_cost_an_error(data: bytes) -> None:
    with pytest.raises(MalformedFrame, match="no message that is understood here"):
        INDEX.from_client.decode(data)


def test_a_reason_does_not_quote_at_length() -> None:
    with pytest.raises(MalformedFrame) as caught:
        INDEX.from_client.decode(msgspec.msgpack.encode(["x" * 100_000]))
    assert len(str(caught.value)) < 400


def test_numbers_have_64_bits() -> None:
    largest = Data(U64_MAX, U64_MAX, U64_MAX, OpBatch((Extend(LEASE, U64_MAX),)))
    assert there_and_back(INDEX.from_client, largest) == largest
    with pytest.raises(OverflowError):
        INDEX.from_server.encode(Data(1, 1, 1, LeaseDigest(1, U64_MAX + 1)))


def test_a_younger_peer_may_say_more_and_an_older_one_less() -> None:
    """Fields at the end that are not known here, and those with a default that are not known there."""
    younger = [*as_lists(Data(1, 2, 3, OpBatch((Publish(LEASE, 0, b"1234"),)))), "new", ["newer"]]
    younger[4][1][0].append(7)
    expected = Data(1, 2, 3, OpBatch((Publish(LEASE, 0, b"1234"),)))
    assert INDEX.from_client.decode(msgspec.msgpack.encode(younger)) == expected
    assert STEPS.from_server.decode(msgspec.msgpack.encode(["Data", 1, 2, 3, ["StepResult", 4]])) == Data(
        1, 2, 3, StepResult(4)
    )


def test_a_hello_of_any_version_can_be_read() -> None:
    hello = [*as_lists(Hello(b"k" * 16, 1, 0, 0, 0, "name", 99)), "of version 99"]
    assert INDEX.from_client.decode(msgspec.msgpack.encode(hello)) == Hello(b"k" * 16, 1, 0, 0, 0, "name", 99)


def test_a_rejection_of_a_newer_protocol_is_still_a_rejection() -> None:
    wire = msgspec.msgpack.encode(["Reject", "too_old_for_this", "go away"])
    assert INDEX.from_server.decode(wire) == Reject(RejectCode.INVALID, "go away")


def test_each_direction_takes_its_own_messages_only() -> None:
    wake = INDEX.from_server.encode(Data(1, 1, 1, Wake(CacheEpoch(1), (LEASE,))))
    query = INDEX.from_client.encode(Data(1, 1, 1, MatchQueries((MatchQuery(DomainId("d"), Namespace(b""), b""),))))
    for codec, foreign in ((INDEX.from_client, wake), (INDEX.from_server, query), (STEPS.from_client, query)):
        with pytest.raises(MalformedFrame):
            codec.decode(foreign)
