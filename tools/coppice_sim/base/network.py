"""Connections as TCP and gRPC give them, and as they fail.

Within a connection frames arrive in order, late by any delay. A lost frame cuts that direction for good: nothing after
it arrives, and the ends learn of it late or by silence only. When a connection breaks, what was under way is lost or
still arrives afterwards, while a newer connection is open already. A frame may be doubled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from coppice.messages.index import Workers
from coppice.messages.registration import Registered
from coppice.session.frames import Data, Welcome
from coppice_sim.base.process import Process
from coppice_sim.base.timeline import MS, Timeline

KEEPALIVE_MS = 1_500
REJECTS = 0.2  # of attempts that are blocked


@dataclass(slots=True)
class Weather:
    """How bad the network is now. All rates per frame."""

    loss: float = 0.0
    duplication: float = 0.0
    delay_ms: float = 1.0  # mean
    spike: float = 0.0  # probability of a delay fifty times as long
    reset: float = 0.0
    partitioned: frozenset[str] = frozenset()  # names of processes that nobody reaches


class Endpoint(Protocol):
    """One end of a connection."""

    process: Process

    def on_frame(self, connection: Connection, frame: Any) -> None: ...

    def on_closed(self, connection: Connection) -> None: ...


class _Direction:
    """Frames on their way from one end to the other, in order."""

    def __init__(self, target: Endpoint) -> None:
        self.target = target
        self.is_cut = False
        self.last_ns = 0


class Connection:
    """Two directions that break together, though neither end need know."""

    def __init__(self, network: Network, client: Endpoint, server: Endpoint) -> None:
        self._network = network
        self._up = _Direction(server)
        self._down = _Direction(client)
        self.is_open = True
        self.names = frozenset({client.process.name, server.process.name})

    def to_server(self, frame: Any) -> None:
        self._network.carry(self, self._up, frame)

    def to_client(self, frame: Any) -> None:
        self._network.carry(self, self._down, frame)

    def close(self, by: Endpoint) -> None:
        """One end hangs up: the other learns of it, perhaps late."""
        self._break(everything_lost=False, closed_by=by)

    def reset(self) -> None:
        self._break(everything_lost=self._network.rng.random() < 0.5, closed_by=None)

    def _break(self, *, everything_lost: bool, closed_by: Endpoint | None) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._network.open_connections.pop(self, None)
        for direction in (self._up, self._down):
            if everything_lost:
                direction.is_cut = True
            if direction.target is not closed_by:
                self._network.tell_closed(self, direction)


class Network:
    def __init__(self, timeline: Timeline, rng: Random) -> None:
        self.timeline = timeline
        self.rng = rng
        self.weather = Weather()
        self._listeners: dict[str, Endpoint] = {}
        self.open_connections: dict[Connection, None] = {}  # in the order in which they were opened
        self.num_lost = 0
        self.num_doubled = 0
        self.overheard: deque[Any] = deque(maxlen=40)  # what is told in confidence, by somebody who listens
        self.num_late = 0  # frames that arrived after their connection had broken

    def listen(self, address: str, server: Endpoint) -> None:
        """In place of whoever listened there before."""
        self._listeners[address] = server

    def listener(self, address: str) -> Endpoint | None:
        """None: nobody listens there, or a process that has died."""
        server = self._listeners.get(address)
        return server if server is not None and server.process.is_alive else None

    def connect(self, client: Endpoint, server: Endpoint | None) -> Connection | None:
        """None: nobody listens there, or the way is blocked."""
        if server is None or self._is_blocked(frozenset({client.process.name, server.process.name})):
            return None
        connection = Connection(self, client, server)
        self.open_connections[connection] = None
        return connection

    def refuses(self, client: Process, address: str) -> bool:
        """How an attempt failed: told that nobody listens there, or nothing came back. Where the way is blocked, what
        blocks it says so in some networks, though somebody does."""
        if client.name in self.weather.partitioned:
            return False
        return self.listener(address) is None or self.rng.random() < REJECTS

    def reset_all(self, name: str) -> None:
        """Break every connection of a process."""
        for connection in list(self.open_connections):
            if name in connection.names:
                connection.reset()

    def carry(self, connection: Connection, direction: _Direction, frame: Any) -> None:
        if direction.is_cut or not connection.is_open:
            return
        said = frame.body if isinstance(frame, Data) else frame
        if isinstance(said, Welcome | Registered | Workers):
            self.overheard.append(said)
        weather, rng = self.weather, self.rng
        if rng.random() < weather.loss or self._is_blocked(connection.names):
            self.num_lost += 1
            direction.is_cut = True
            # The other direction goes on; sooner or later the transport's own timeout ends both.
            silent_ns = self._delay_ns() * 3 if rng.random() < 0.7 else KEEPALIVE_MS * MS
            self.timeline.after(silent_ns, connection.reset)
            return
        times = 1
        if rng.random() < weather.duplication:
            self.num_doubled += 1
            times = 2
        for _ in range(times):
            direction.last_ns = max(direction.last_ns + 1, self.timeline.now_ns + self._delay_ns())
            self.timeline.at(direction.last_ns, self._arrival(connection, direction, frame))
        if rng.random() < weather.reset:
            connection.reset()

    def tell_closed(self, connection: Connection, direction: _Direction) -> None:
        target = direction.target
        self.timeline.after(self._delay_ns(), lambda: target.process.deliver(lambda: target.on_closed(connection)))

    def _arrival(self, connection: Connection, direction: _Direction, frame: Any) -> Callable[[], None]:
        def arrive() -> None:
            if direction.is_cut and not connection.is_open:
                return
            self.num_late += not connection.is_open
            target = direction.target
            target.process.deliver(lambda: target.on_frame(connection, frame))

        return arrive

    def _delay_ns(self) -> int:
        delay_ms = self.rng.expovariate(1.0) * self.weather.delay_ms
        if self.rng.random() < self.weather.spike:
            delay_ms *= 50
        return int(delay_ms * MS) + 1

    def _is_blocked(self, names: frozenset[str]) -> bool:
        return bool(names & self.weather.partitioned)
