"""Streams over one link arrive whole and in order, beside each other; its end is told as what it was."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from coppice.edge.wire import Wire
from coppice_worker.parallel.commands import CopyBlocks, ZeroBlocks, encode, receive
from coppice_worker.parallel.errors import LinkLost
from coppice_worker.parallel.nodes import link as module
from coppice_worker.parallel.nodes.link import PIECE_BYTES, Kind, Link
from coppice_worker.parallel.nodes.terms import read_facts
from tests.fakes.waiting import wait_for

WAIT_S = 60.0


class End:
    """One end, run by a thread; `ended`: how its run ended."""

    def __init__(self, connection: socket.socket, silence_s: float) -> None:
        self.wire = Wire(connection)
        self.link = Link(self.wire, "somebody", silence_s)
        self.ended: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def run(self) -> None:
        self._thread.start()

    def end(self) -> str:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.ended[0]

    def _run(self) -> None:
        try:
            self.link.run()
            self.ended.append("in order")
        except LinkLost as error:
            self.ended.append(str(error))


@contextmanager
def ends(silence_s: float = WAIT_S) -> Iterator[tuple[End, End]]:
    ours, theirs = (End(one, silence_s) for one in socket.socketpair())
    try:
        yield ours, theirs
    finally:
        for end in (ours, theirs):
            end.link.abort()


def test_commands_and_copies_arrive_side_by_side() -> None:
    with ends() as (ours, theirs):
        ours.run()
        theirs.run()
        large = np.arange(PIECE_BYTES, dtype=np.int32)  # in several messages
        ours.link.commands.sendall(encode(ZeroBlocks(large)))
        ours.link.copies.sendall(b"1")
        ours.link.commands.sendall(encode(CopyBlocks(large[:3], large[3:6])))
        assert theirs.link.copies.recv(1) == b"1"
        first, second = receive(theirs.link.commands), receive(theirs.link.commands)
        assert isinstance(first, ZeroBlocks)
        np.testing.assert_array_equal(first.block_ids, large)
        assert isinstance(second, CopyBlocks)
        assert second.dst.tolist() == [3, 4, 5]


def test_a_farewell_is_an_end_in_order_on_both_sides() -> None:
    with ends() as (ours, theirs):
        ours.run()
        theirs.run()
        ours.link.commands.sendall(encode(ZeroBlocks(np.arange(2, dtype=np.int32))))
        ours.link.bid_farewell()
        assert theirs.end() == "in order"
        assert receive(theirs.link.commands) is not None, "what was said before is heard"
        assert receive(theirs.link.commands) is None
        theirs.link.close()
        assert ours.end() == "in order"


def test_a_connection_that_breaks_is_none() -> None:
    with ends() as (ours, theirs):
        theirs.run()
        ours.wire.close()
        assert theirs.end().startswith("the connection broke: ")
        assert receive(theirs.link.commands) is None
        with pytest.raises(BrokenPipeError):
            theirs.link.commands.sendall(b"x")


def test_silence_is_an_end_though_nothing_breaks() -> None:
    with ends(silence_s=0.3) as (_, theirs):
        theirs.run()
        assert theirs.end().startswith("it said nothing for")


def test_two_that_beat_do_not_fall_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    with ends() as (ours, theirs):
        ours.run()
        theirs.run()
        for _ in range(10):  # though nothing is said
            heard_s = [end.wire.heard_s for end in (ours, theirs)]
            wait_for(
                lambda heard_s=heard_s: all(
                    end.wire.heard_s > before_s for end, before_s in zip((ours, theirs), heard_s, strict=True)
                ),
                "a beat of each",
            )
        assert not ours.ended
        assert not theirs.ended


def test_who_does_not_take_what_it_is_told_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_BYTES_MAX", 100)
    with ends() as (ours, theirs):
        theirs.run()
        ours.link.commands.sendall(bytes(80))
        ours.link.commands.sendall(bytes(80))
        assert theirs.end() == "80 bytes wait here to be read"


@pytest.mark.parametrize("kind", [Kind.ASK, 99])
def test_what_is_for_nobody_here_ends_it(kind: int) -> None:
    with ends() as (ours, theirs):
        theirs.run()
        ours.wire.write(bytes([kind]) + b"what")
        assert theirs.end() == f"it sent a message of kind {kind}, which is none for here"


@pytest.mark.parametrize("facts", [b"", b"[]", b"{'a': 1}", b'{"a": 1}'])
def test_what_cannot_be_read_ends_it(facts: bytes) -> None:
    with ends() as (ours, theirs):
        theirs.link.on(Kind.LOADED, lambda raw: facts_read.append(read_facts(raw)))
        facts_read: list[dict[str, str]] = []
        theirs.run()
        ours.link.send(Kind.LOADED, facts)
        assert theirs.end().startswith("what it sent cannot be used: ")
        assert not facts_read


def test_a_handler_that_finds_fault_ends_it() -> None:
    with ends() as (ours, theirs):

        def refuse(_: bytes) -> None:
            raise LinkLost("it will not do")

        theirs.link.on(Kind.LOADED, refuse)
        theirs.run()
        ours.link.send(Kind.LOADED, b"{}")
        assert theirs.end() == "it will not do"
