"""What accepts connections outlives whatever befalls one of them."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from queue import Queue

import pytest

from coppice.edge import acceptor
from coppice.edge.acceptor import Acceptor
from tests.fakes.waiting import wait_for

WAIT_S = 60.0


class Host:
    """Keeps the connections it is given. `fails`: what it raises first, once each."""

    def __init__(self, *fails: BaseException, most: int = 8) -> None:
        self.fails = list(fails)
        self.begun: Queue[tuple[socket.socket, Callable[[], None]]] = Queue()
        listener = socket.create_server(("127.0.0.1", 0))
        self.where = listener.getsockname()
        self.acceptor = Acceptor(listener, self.begin, most=most, what="guests")

    def begin(self, connection: socket.socket, peer: object, over: Callable[[], None]) -> None:
        if self.fails:
            raise self.fails.pop(0)
        self.begun.put((connection, over))


def test_what_could_not_begin_is_closed_and_the_next_one_is_accepted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.01)
    errors = [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")] * 3
    host = Host(*errors, most=2)  # more of them than there are places: each place comes back
    host.acceptor.start()
    for _ in range(len(errors)):
        with socket.create_connection(host.where, WAIT_S) as guest:
            assert guest.recv(1) == b""
    with socket.create_connection(host.where, WAIT_S):
        host.begun.get(timeout=WAIT_S)[0].close()
    assert "a connection could not be accepted, of guests: can't start new thread" in caplog.text
    host.acceptor.close()


def test_who_finds_no_place_waits_for_one(caplog: pytest.LogCaptureFixture) -> None:
    said = "1 connections of guests are open, the most there may be; others wait"
    host = Host(most=1)
    host.acceptor.start()
    with socket.create_connection(host.where), socket.create_connection(host.where):
        first, over = host.begun.get(timeout=WAIT_S)
        wait_for(lambda: caplog.text.count(said) == 1, "the one place to be taken")
        assert host.begun.empty()
        over()
        second, _ = host.begun.get(timeout=WAIT_S)
        wait_for(lambda: caplog.text.count(said) == 2, "it to be taken again")
    host.acceptor.close()
    for each in (first, second):
        each.close()


@pytest.mark.parametrize("most", [1, 2], ids=["without a place", "with one"])
def test_it_ends_when_it_is_closed_and_says_nothing(most: int, caplog: pytest.LogCaptureFixture) -> None:
    host = Host(most=most)
    host.acceptor.start()
    with socket.create_connection(host.where):
        connection, _ = host.begun.get(timeout=WAIT_S)
        host.acceptor.close()
        connection.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "accepts guests"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(host.where)
    assert not [record for record in caplog.records if "could not" in record.message]
