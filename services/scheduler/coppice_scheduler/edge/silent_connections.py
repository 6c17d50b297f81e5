"""The listener of a front door, and connections on which no byte has come yet.

    accepted --timeout_s--> first byte --> what `protocol` makes, on a transport of asyncio
        +-- one too many: the one that has been silent longest is cut, or the newcomer where none is silent

A transport of asyncio costs some 140 microseconds of the event loop from accept to close, so that ten thousand
connections that say nothing would stop all streams for seconds. Here a silent one is a socket in a selector of its own.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections import deque
from collections.abc import Callable

# Are accepted in one turn of the event loop, and as many that begin to talk are handed on: others have turns between.
PER_TURN = 32
_RETRY_S = 1.0  # when the process is out of files and nobody is silent


class SilentConnections:
    """Accepts on `listener` until `close`. On its event loop.

    `num_open` says how many connections were handed on and are open; with those that are silent there are at most
    `connections_max`.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.BaseProtocol],
        num_open: Callable[[], int],
        connections_max: int,
        timeout_s: float,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._num_open = num_open
        self._connections_max = connections_max
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._silent: dict[int, tuple[socket.socket, float]] = {}  # by descriptor, until when; the oldest first
        self._talking: deque[socket.socket] = deque()  # their first bytes are here
        self._opening: set[asyncio.Task[None]] = set()  # they get their transports
        self._num_opening = 0  # of these, `num_open` does not count them yet
        self._selector = selectors.DefaultSelector()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)
        self._loop.add_reader(self._selector, self._hear)

    @property
    def num_silent(self) -> int:
        return len(self._silent)

    def close(self) -> None:
        """Nobody is accepted any more, and who was not handed on is cut. Again: nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        self._loop.remove_reader(self._selector)
        if self._timer is not None:
            self._timer.cancel()
        while self._silent:
            self._cut_oldest()
        while self._talking:
            self._talking.popleft().close()
        self._selector.close()
        self._listener.close()

    async def wait_closed(self) -> None:
        """Until all that were handed on before `close` have their transports."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    # ---- accept ----

    def _accept(self) -> None:
        for _ in range(PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # nobody waits, or who waited has left
            except OSError:  # out of files
                self._make_room_for_files()
                return
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        num_talking = len(self._talking) + self._num_opening + self._num_open()
        if len(self._silent) + num_talking >= self._connections_max:
            if not self._silent:
                connection.close()
                return
            self._cut_oldest()
        connection.setblocking(False)
        self._silent[connection.fileno()] = connection, self._loop.time() + self._timeout_s
        self._selector.register(connection, selectors.EVENT_READ)
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._cut_late)

    def _make_room_for_files(self) -> None:
        """A listener stays readable while somebody waits: without a pause the loop would turn in circles."""
        if self._silent:
            self._cut_oldest()
            return
        self._loop.remove_reader(self._listener)
        self._loop.call_later(_RETRY_S, self._listen_again)

    def _listen_again(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener, self._accept)

    # ---- the end of silence ----

    def _hear(self) -> None:
        is_first = not self._talking
        for key, _ in self._selector.select(0):
            self._selector.unregister(key.fd)
            self._talking.append(self._silent.pop(key.fd)[0])
        if is_first:
            self._hand_on()

    def _hand_on(self) -> None:
        for _ in range(min(len(self._talking), PER_TURN)):
            connection = self._talking.popleft()
            if _has_left(connection):
                connection.close()
                continue
            self._num_opening += 1
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        if self._talking:
            self._loop.call_soon(self._hand_on)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # it left meanwhile
            connection.close()

    def _make_protocol(self) -> asyncio.BaseProtocol:
        # Right before the transport calls `connection_made`: none is counted twice, and none is left out.
        self._loop.call_soon(self._is_open)
        return self._protocol()

    def _is_open(self) -> None:
        self._num_opening -= 1

    def _cut_oldest(self) -> None:
        descriptor = next(iter(self._silent))
        connection, _ = self._silent.pop(descriptor)
        self._selector.unregister(descriptor)
        connection.close()

    def _cut_late(self) -> None:
        now = self._loop.time()
        while self._silent:
            _, deadline = next(iter(self._silent.values()))
            if deadline > now:
                self._timer = self._loop.call_at(deadline, self._cut_late)
                return
            self._cut_oldest()
        self._timer = None


def _has_left(connection: socket.socket) -> bool:
    """It ended, or was reset, without a byte."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
