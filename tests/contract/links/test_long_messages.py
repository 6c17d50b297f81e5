"""A long message is neither copied to be sent nor taken out of what was received."""

from __future__ import annotations

from coppice.edge.wire import Splitter, framed, packed

LONG = bytes(range(256)) * 1_024
MESSAGES = [b"one", b"", LONG, b"two", b"three", LONG[:-1], b"four"]


def test_short_messages_share_a_piece_and_a_long_one_is_its_own() -> None:
    pieces = list(framed(*MESSAGES))
    assert [piece is LONG for piece in pieces] == [False, True, False, False, False]
    assert packed(*MESSAGES) == b"".join(pieces)
    assert len(list(framed(b"one", b"two"))) == 1
    assert not list(framed())


def test_what_came_stays_as_it_is_while_more_comes() -> None:
    splitter = Splitter(len(LONG))
    data = packed(*MESSAGES, *reversed(MESSAGES))
    found: list[memoryview] = []
    for start in range(0, len(data), 100_003):
        splitter.feed(data[start : start + 100_003])
        found += splitter.split()
    assert found == [*MESSAGES, *reversed(MESSAGES)]
    splitter.clear()
    assert found == [*MESSAGES, *reversed(MESSAGES)]


def test_they_lie_where_they_were_received() -> None:
    splitter = Splitter(len(LONG))
    splitter.feed(packed(LONG, b"one"))
    long, short = splitter.split()
    assert long.obj is short.obj
