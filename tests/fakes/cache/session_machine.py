"""Two pure ends of a session and the network between them, driven by Hypothesis.

A connection is two queues; the client may leave it at any time, and what still sits in it arrives later, or never.
Every session has an incarnation, under which both ends' posts are recorded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coppice.session.frames import Data, Hello, Reject, RejectCode, Welcome
from coppice.session.link import Attached, ClientLink, ServerLink, ServerLinks

KEY = b"k" * 16


@dataclass
class Connection:
    """One stream: what each end wrote and the other has not read."""

    up: deque[Any] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)
    link: ServerLink[str] | None = None  # once the server accepted it
    rejected: bool = False


@dataclass
class Ledger:
    """What was posted and what arrived in one session, per direction."""

    up_posted: list[str] = field(default_factory=list)
    up_arrived: list[str] = field(default_factory=list)
    down_posted: list[str] = field(default_factory=list)
    down_arrived: list[str] = field(default_factory=list)


class SessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.client: ClientLink[str] = ClientLink(KEY, "client")
        self.connections: list[Connection] = []
        self.incarnation = 0  # of the session that the client is attached to
        self.ledgers: dict[int, Ledger] = {0: Ledger()}
        self.num_bodies = 0
        self.num_epochs = 0
        self.num_servers = 0
        self.opened: set[int] = set()
        self.must_resume = False  # the client's session lives at the server: its next attachment is not fresh
        self.start_server()

    def start_server(self) -> None:
        self.num_servers += 1
        self.links: ServerLinks[str] = ServerLinks(self.num_servers, server_epoch=100 + self.num_servers)

    @property
    def live(self) -> ServerLink[str] | None:
        """The session that the server has of the client."""
        return self.links._links.get(KEY)

    def body(self) -> str:
        self.num_bodies += 1
        return str(self.num_bodies)

    # ---- the client ----

    def client_connects(self) -> None:
        connection = Connection()
        connection.up.append(self.client.connect())
        self.connections.append(connection)

    @initialize()
    def first_attachment(self) -> None:
        self.client_connects_at_once()

    @rule()
    def client_connects_at_once(self) -> None:
        """The whole handshake, while earlier connections still have something in them."""
        self.client_connects()
        self.server_takes(self.connections[-1])
        self.client_takes(self.connections[-1], is_newest=True)

    @rule(count=st.integers(1, 3), written=st.booleans())
    def client_posts(self, count: int, written: bool) -> None:
        for _ in range(count):
            body = self.body()
            self.client.post(body)
            self.ledgers[self.incarnation].up_posted.append(body)
        if written and self.connections:
            self.client_writes(beat=False)

    @precondition(lambda self: self.connections)
    @rule(beat=st.booleans())
    def client_writes(self, beat: bool) -> None:
        frames: list[Any] = list(self.client.outgoing())
        if beat and self.client.is_attached:
            frames.append(self.client.heartbeat())
        self.connections[-1].up.extend(frames)

    @precondition(lambda self: any(connection.down for connection in self.connections))
    @rule(data=st.data(), count=st.integers(1, 4))
    def client_reads(self, data: st.DataObject, count: int) -> None:
        """From any connection: an old one's bytes may reach the client late, a refusal only on the newest."""
        waiting = [index for index, connection in enumerate(self.connections) if connection.down]
        index = data.draw(st.sampled_from(waiting))
        for _ in range(min(count, len(self.connections[index].down))):
            self.client_takes(self.connections[index], is_newest=index == len(self.connections) - 1)

    def client_takes(self, connection: Connection, *, is_newest: bool) -> None:
        frame = connection.down.popleft()
        if isinstance(frame, Reject) and not is_newest:
            return
        heard = self.client.receive(frame)
        if isinstance(heard, Attached):
            assert isinstance(frame, Welcome)
            self.attached(heard, frame.incarnation)
        elif isinstance(heard, list):
            self.ledgers[self.incarnation].down_arrived.extend(heard)
        else:
            raise AssertionError(f"an honest client was refused: {heard}")

    def attached(self, event: Attached, incarnation: int) -> None:
        if event.fresh:
            assert not self.must_resume, "fresh although the server had the session"
            assert incarnation != self.incarnation
        else:
            assert incarnation == self.incarnation
        self.incarnation = incarnation
        self.ledgers.setdefault(incarnation, Ledger())
        self.must_resume = self.live is not None and self.live.incarnation == incarnation

    # ---- the server ----

    @precondition(lambda self: any(connection.up for connection in self.connections))
    @rule(data=st.data(), count=st.integers(1, 4))
    def server_reads(self, data: st.DataObject, count: int) -> None:
        """From any connection, dead ones too: their bytes were on the way."""
        connection = data.draw(st.sampled_from([connection for connection in self.connections if connection.up]))
        for _ in range(min(count, len(connection.up))):
            self.server_takes(connection)

    def server_takes(self, connection: Connection) -> None:
        frame = connection.up.popleft()
        if isinstance(frame, Hello):
            self.server_accepts(connection, frame)
        elif connection.link is not None and connection.link is self.live:
            ledger = self.ledgers[connection.link.incarnation]
            newest = connection.link.connection == frame.connection
            bodies = connection.link.receive(frame)
            assert newest or not bodies, "bytes of a dead connection were processed"
            ledger.up_arrived.extend(bodies)

    def server_accepts(self, connection: Connection, hello: Hello) -> None:
        accepted = self.links.accept(hello, self.mint)
        if isinstance(accepted, Reject):
            assert accepted.code is RejectCode.STALE_CONNECTION, accepted
            assert hello.connection < self.client.connection, "the newest connection of a client was refused"
            connection.rejected = True
            connection.down.append(accepted)
            return
        incarnation = accepted.link.incarnation
        assert accepted.is_new == (incarnation not in self.opened)
        self.opened.add(incarnation)
        self.ledgers.setdefault(incarnation, Ledger())
        connection.link = accepted.link
        connection.down.append(accepted.welcome)

    def mint(self, hello: Hello) -> int:
        self.num_epochs += 1
        return self.num_epochs

    @precondition(lambda self: self.live is not None)
    @rule(count=st.integers(1, 3), written=st.booleans())
    def server_posts(self, count: int, written: bool) -> None:
        assert self.live is not None
        for _ in range(count):
            body = self.body()
            self.live.post(body)
            self.ledgers[self.live.incarnation].down_posted.append(body)
        if written:
            self.server_writes(beat=False)

    @precondition(lambda self: self.live is not None)
    @rule(beat=st.booleans())
    def server_writes(self, beat: bool) -> None:
        assert self.live is not None
        frames: list[Any] = list(self.live.outgoing())
        if beat:
            frames.append(self.live.heartbeat())
        for connection in self.connections:
            if connection.link is self.live and connection is self.newest_of(self.live):
                connection.down.extend(frames)

    def newest_of(self, link: ServerLink[str]) -> Connection:
        return self.connections[link.connection - 1]

    # ---- faults ----

    @precondition(lambda self: self.connections)
    @rule(data=st.data(), keep=st.integers(0, 3))
    def connection_is_cut(self, data: st.DataObject, keep: int) -> None:
        """All but the first `keep` frames of each direction are lost; the client hears of it and leaves."""
        connection = data.draw(st.sampled_from(self.connections))
        for queue in (connection.up, connection.down):
            while len(queue) > keep:
                queue.pop()
        if connection is self.connections[-1]:
            self.client_connects()

    @precondition(lambda self: any(connection.up or connection.down for connection in self.connections))
    @rule()
    def messages_are_doubled(self) -> None:
        for connection in self.connections:
            for queue in (connection.up, connection.down):
                if queue and isinstance(queue[-1], Data):
                    queue.append(queue[-1])

    @precondition(lambda self: self.live is not None)
    @rule(restarts=st.booleans())
    def server_forgets(self, restarts: bool) -> None:
        assert self.live is not None
        if restarts:
            self.start_server()
        else:
            self.links.forget(self.live)
        self.must_resume = False

    # ---- what holds ----

    @invariant()
    def arrived_in_order_once(self) -> None:
        for ledger in self.ledgers.values():
            assert ledger.up_arrived == ledger.up_posted[: len(ledger.up_arrived)]
            assert ledger.down_arrived == ledger.down_posted[: len(ledger.down_arrived)]

    def teardown(self) -> None:
        """On a network that works, everything that the last session owes arrives."""
        self.client_connects()
        for _ in range(4):
            self.client_writes(beat=True)
            while self.connections[-1].up:
                self.server_takes(self.connections[-1])
            self.server_writes(beat=True)
            while self.connections[-1].down:
                self.client_takes(self.connections[-1], is_newest=True)
        ledger = self.ledgers[self.incarnation]
        assert self.incarnation != 0, "the client did not attach"
        assert ledger.up_arrived == ledger.up_posted
        assert ledger.down_arrived == ledger.down_posted
        assert self.live is not None
        assert self.client.is_idle, "acknowledged messages are kept"
        assert not self.live._flow.outbox
