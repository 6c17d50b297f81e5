"""Connections on which nothing came: few turns of the event loop, their bound, their time, and their way on."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest

from coppice_scheduler.edge.silent_connections import PER_TURN, SilentConnections
from tests.fakes.waiting import WAIT_S

FOREVER_S = 3600.0


class Served:
    """A listener with a protocol that says what it heard, and its clients."""

    def __init__(self, open_: ExitStack, connections_max: int, timeout_s: float) -> None:
        self._open = open_
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
        self.talking: list[Heard] = []
        self.silent = SilentConnections(
            self.listener, self._heard, lambda: len(self.talking), connections_max, timeout_s
        )
        open_.callback(self.silent.close)

    def _heard(self) -> Heard:
        self.talking.append(Heard())
        return self.talking[-1]

    def connect(self, count: int = 1) -> list[socket.socket]:
        connections = []
        for _ in range(count):
            connection = self._open.enter_context(socket.create_connection(self.listener.getsockname()))
            connection.setblocking(False)
            connections.append(connection)
        return connections

    async def are_silent(self, count: int) -> None:
        await until(lambda: self.silent.num_silent == count)


class Heard(asyncio.Protocol):
    def __init__(self) -> None:
        self.data = b""
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data


async def until(look: Callable[[], bool]) -> None:
    while not look():
        await asyncio.sleep(0)  # each turn of the loop is looked at


def serve(
    test: Callable[[Served], Awaitable[None]], *, connections_max: int = 1000, timeout_s: float = FOREVER_S
) -> None:
    async def run() -> None:
        with ExitStack() as open_:
            async with asyncio.timeout(WAIT_S):
                served = Served(open_, connections_max, timeout_s)
                await test(served)
                for heard in served.talking:
                    await until(lambda heard=heard: heard.transport is not None)  # type: ignore[misc]
                    heard.transport.abort()

    asyncio.run(run())


async def end_of(connection: socket.socket) -> bytes:
    try:
        return await asyncio.get_running_loop().sock_recv(connection, 1)
    except ConnectionResetError:
        return b""


def test_who_talks_is_handed_on_with_all_that_came() -> None:
    async def test(served: Served) -> None:
        (first,) = served.connect()
        await served.are_silent(1)
        assert not served.talking
        first.sendall(b"abc")
        await until(lambda: bool(served.talking) and served.talking[0].data == b"abc")
        assert served.silent.num_silent == 0

    serve(test)


def test_the_one_that_is_silent_longest_makes_room_and_nobody_who_talks() -> None:
    async def test(served: Served) -> None:
        (talks,) = served.connect()
        talks.sendall(b"a")
        await until(lambda: len(served.talking) == 1)
        first, second = served.connect(2)
        await served.are_silent(2)
        served.connect()
        assert await end_of(first) == b""
        second.sendall(b"b")
        await until(lambda: len(served.talking) == 2)
        for connection in served.connect(2):
            connection.sendall(b"c")
        await until(lambda: len(served.talking) == 3)
        (beyond,) = served.connect()
        assert await end_of(beyond) == b"", "nobody is silent"
        assert not any(heard.transport.is_closing() for heard in served.talking)

    serve(test, connections_max=3)


def test_silence_has_its_time_and_ends_with_the_first_byte() -> None:
    async def test(served: Served) -> None:
        talks, silent = served.connect(2)
        talks.sendall(b"a")
        assert await end_of(silent) == b""
        await until(lambda: len(served.talking) == 1 and served.silent.num_silent == 0)
        (later,) = served.connect()
        assert await end_of(later) == b"", "the timer runs again"
        assert not served.talking[0].transport.is_closing()

    serve(test, timeout_s=0.2)


def test_who_leaves_without_a_word_gets_no_transport() -> None:
    async def test(served: Served) -> None:
        connections = served.connect(3)
        await served.are_silent(3)
        for connection in connections:
            connection.close()
        await served.are_silent(0)
        await served.silent.wait_closed()
        assert not served.talking

    serve(test)


def test_a_crowd_leaves_others_their_turns() -> None:
    """Asyncio accepts as many at once as may wait, and reads from all of them."""

    async def test(served: Served) -> None:
        async def per_turn(look: Callable[[], int], total: int) -> int:
            turns = [look()]
            while turns[-1] < total:
                await asyncio.sleep(0)
                turns.append(look())
            return max(after - before for before, after in pairwise(turns))

        crowd = served.connect(100)
        assert await per_turn(lambda: served.silent.num_silent, 100) <= PER_TURN
        for connection in crowd:
            connection.sendall(b"a")
        assert await per_turn(lambda: len(served.talking), 100) <= PER_TURN

    serve(test)


def test_after_its_end_nobody_is_silent_and_who_talks_stays() -> None:
    async def test(served: Served) -> None:
        talks, silent = served.connect(2)
        talks.sendall(b"a")
        await until(lambda: len(served.talking) == 1 and served.silent.num_silent == 1)
        served.silent.close()
        served.silent.close()
        assert await end_of(silent) == b""
        talks.sendall(b"b")
        await until(lambda: served.talking[0].data == b"ab")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", talks.getpeername()[1]))

    serve(test)


class OutOfFiles:
    """A listener whose next connections find the process out of files."""

    def __init__(self, listener: socket.socket, times: int) -> None:
        self._listener = listener
        self.times = times

    def accept(self) -> tuple[socket.socket, Any]:
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


@pytest.mark.parametrize("num_silent", [0, 2])
def test_out_of_files_the_silent_go_and_the_listener_goes_on(num_silent: int) -> None:
    async def test(served: Served) -> None:
        silent = served.connect(num_silent)
        await served.are_silent(num_silent)
        served.silent._listener = OutOfFiles(served.listener, times=1)  # type: ignore[assignment]
        (newcomer,) = served.connect()
        newcomer.sendall(b"a")
        await until(lambda: len(served.talking) == 1)
        assert served.silent.num_silent == max(0, num_silent - 1)
        if silent:
            assert await end_of(silent[0]) == b""

    serve(test)
