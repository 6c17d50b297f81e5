"""Tokens of many requests find their streams, in order, whatever came together."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.ids import DomainId, SequenceId
from coppice.messages.step import SamplingParams, TokenLogprobs
from coppice_scheduler.core.state.request import (
    Finish,
    Output,
    OutputError,
    OutputErrorCode,
    Refused,
    RefusedReason,
    Request,
    TokenBatch,
)
from coppice_scheduler.edge.base.engine import RequestRefused
from coppice_scheduler.edge.text.streams import Stream, Streams, pieces
from tests.fakes.api.engine import pack, unpack

WAIT_S = 60.0


def request(name: str) -> Request:
    return Request(name, "t", DomainId("d"), bytes(8), SamplingParams(), 4)


def batch(*pairs: tuple[int, int]) -> TokenBatch:
    return TokenBatch(pack([number for number, _ in pairs]), pack([token for _, token in pairs]))


def read(stream: Stream) -> Output:
    return asyncio.run(asyncio.wait_for(stream.read(), WAIT_S))


@given(st.lists(st.tuples(st.sampled_from([0, 1, 7, 2**24, 2**32 - 1]), st.integers(0, 2**32 - 1))))
def test_every_token_gets_to_its_request_in_order(pairs: list[tuple[int, int]]) -> None:
    expected: dict[int, list[int]] = {}
    for number, token in pairs:
        expected.setdefault(number, []).append(token)
    found = list(pieces(batch(*pairs)))
    assert len(found) == len(expected), "one piece for each request"
    assert {number: unpack(tokens) for number, tokens in found} == expected


def test_what_waits_is_joined_into_one_output() -> None:
    streams = Streams()
    one, two = streams.open(request("one")), streams.open(request("two"))
    numbers = (one.request.number, two.request.number)
    streams.take([batch((numbers[0], 1), (numbers[1], 2), (numbers[0], 3))], [])
    streams.take([batch((numbers[0], 4))], [Output("one", pack([5]), Finish.LENGTH, num_output_tokens=4)])
    output = read(one)
    assert (unpack(output.tokens), output.finish, output.num_output_tokens) == ([1, 3, 4, 5], Finish.LENGTH, 4)
    assert one.has_ended
    assert (unpack(read(two).tokens), two.has_ended) == ([2], False)


def test_what_was_read_does_not_come_again() -> None:
    streams = Streams()
    stream = streams.open(request("one"))
    first = TokenLogprobs(SequenceId(1), 0, 0, bytes(4))
    streams.take([], [Output("one", pack([1]), logprobs=(first,))])
    assert (unpack(read(stream).tokens), stream.has_ended) == ([1], False)
    second = TokenLogprobs(SequenceId(1), 1, 0, bytes(4))
    streams.take([], [Output("one", pack([2]), logprobs=(second,)), Output("one", b"", Finish.STOP, logprobs=(first,))])
    output = read(stream)
    assert (unpack(output.tokens), output.logprobs) == ([2], (second, first))


def test_numbers_are_unique_among_the_open_ones_and_carry_their_owner() -> None:
    streams = Streams(first_number=3 << 24)
    opened = [streams.open(request(str(index))) for index in range(100)]
    numbers = np.array([stream.request.number for stream in opened], dtype=np.uint32)
    assert len(set(numbers.tolist())) == 100
    assert set((numbers >> 24).tolist()) == {3}


def test_a_number_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coppice_scheduler.edge.text.streams._COUNTER_MASK", 3)
    streams = Streams()
    kept = streams.open(request("kept"))
    for turn in range(6):
        stream = streams.open(request(str(turn)))
        assert stream.request.number != kept.request.number
        streams.close(stream)


def test_closed_streams_take_nothing_and_refusals_are_raised() -> None:
    streams = Streams()
    closed, refused = streams.open(request("closed")), streams.open(request("refused"))
    streams.close(closed)
    streams.take([batch((closed.request.number, 1))], [Output("closed", pack([1]))])
    assert len(streams) == 1
    streams.refuse("refused", Refused(RefusedReason.EMPTY, "no", 0))
    assert refused.has_ended
    with pytest.raises(RequestRefused, match="no"):
        read(refused)


def test_ending_all_leaves_alone_what_has_ended() -> None:
    streams = Streams()
    ended, open_ = streams.open(request("ended")), streams.open(request("open"))
    streams.take([], [Output("ended", b"", Finish.STOP)])
    streams.end_all(OutputError(OutputErrorCode.INTERNAL, "gone"))
    assert read(ended).finish is Finish.STOP
    output = read(open_)
    assert (output.finish, output.error) == (Finish.ERROR, OutputError(OutputErrorCode.INTERNAL, "gone"))
