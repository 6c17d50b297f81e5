"""Sessions over connections that lose, cut and delay: exactly once, in order, fresh only when the server forgot.

Two pure ends and a network between them. A connection is two queues; the client may leave it at any time, and what
still sits in it arrives later, or never. Every session has an incarnation, under which both ends' posts are recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from coppice.session import link as link_module
from coppice.session.frames import PROTOCOL_VERSION, Data, Heartbeat, Hello, Reject, RejectCode, Welcome
from coppice.session.link import Attached, ClientLink, LinkBroken, LinkOverflow, ServerLink, ServerLinks
from coppice.session.pause import PauseGuard

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


SETTINGS = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


def test_each_message_arrives_once_and_in_order() -> None:
    run_state_machine_as_test(SessionMachine, settings=SETTINGS)


# ---- the machine sees broken rules ----


def _forget_connection(flow: Any, frame: Any) -> list[Any]:
    return TAKE(flow, replace(frame, connection=flow.connection))


def _accept_gaps(flow: Any, frame: Any) -> list[Any]:
    if isinstance(frame, Data) and frame.number > flow.received:
        flow.received = frame.number - 1
    return TAKE(flow, frame)


def _accept_repeats(flow: Any, frame: Any) -> list[Any]:
    if isinstance(frame, Data) and frame.connection == flow.connection and frame.number <= flow.received:
        return [frame.body]
    return TAKE(flow, frame)


def _resend_nothing(flow: Any, peer_received: int) -> None:
    flow.acknowledge(max(peer_received, flow.acked))
    flow.sent = flow.posted


def _keep_numbers(flow: Any) -> None:
    flow.outbox.clear()
    flow.acked = flow.sent = flow.posted


def _keep_acknowledged(flow: Any, ack: int) -> None:
    pass


def _one_incarnation(links: Any) -> int:
    return int(links._incarnation)


TAKE = link_module._Flow.take
MUTANTS: list[tuple[str, type, str, Callable[..., Any]]] = [
    ("frames of old connections count", link_module._Flow, "take", _forget_connection),
    ("repeated messages count again", link_module._Flow, "take", _accept_repeats),
    ("nothing is sent again after a reconnect", link_module._Flow, "rewind", _resend_nothing),
    ("a fresh session keeps its numbers", link_module._Flow, "reset", _keep_numbers),
    ("acknowledged messages are kept", link_module._Flow, "acknowledge", _keep_acknowledged),
    ("a reopened session has the incarnation of the one before", ServerLinks, "_next_incarnation", _one_incarnation),
]


@pytest.mark.parametrize(("owner", "name", "broken"), [mutant[1:] for mutant in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_a_broken_rule_is_noticed(
    owner: type, name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    noticed = settings(SETTINGS, phases=[Phase.generate], max_examples=600, derandomize=True)
    with pytest.raises(Exception) as caught:  # noqa: PT011  an assertion, a broken link or a group of both
        run_state_machine_as_test(SessionMachine, settings=noticed)
    assert isinstance(caught.value, (AssertionError, LinkBroken, ExceptionGroup, IndexError))


# ---- single rules ----


def attach(client: ClientLink[str], links: ServerLinks[str], epoch: int = 9) -> ServerLink[str]:
    accepted = links.accept(client.connect(), lambda _: epoch)
    assert not isinstance(accepted, Reject)
    assert isinstance(client.receive(accepted.welcome), Attached)
    return accepted.link


def test_versions_must_agree_and_both_are_named() -> None:
    links: ServerLinks[str] = ServerLinks(1, 1)
    hello = ClientLink[str](KEY, "new").connect()
    refused = links.accept(replace(hello, version=7), lambda _: 1)
    assert isinstance(refused, Reject)
    assert refused.code is RejectCode.VERSION
    assert "7" in refused.message
    assert str(PROTOCOL_VERSION) in refused.message

    client: ClientLink[str] = ClientLink(KEY, "old")
    accepted = links.accept(client.connect(), lambda _: 1)
    assert not isinstance(accepted, Reject)
    heard = client.receive(replace(accepted.welcome, version=7))
    assert isinstance(heard, Reject)
    assert heard.code is RejectCode.VERSION
    assert not client.is_attached


def test_a_refusal_of_the_application_opens_nothing() -> None:
    links: ServerLinks[str] = ServerLinks(1, 1)
    refusal = Reject(RejectCode.FENCED, "no")
    assert links.accept(ClientLink[str](KEY, "c").connect(), lambda _: refusal) is refusal
    assert len(links) == 0


@pytest.mark.parametrize(("key", "connection"), [(b"short", 1), (KEY, 0)])
def test_a_malformed_hello_is_refused(key: bytes, connection: int) -> None:
    links: ServerLinks[str] = ServerLinks(1, 1)
    hello = Hello(key=key, connection=connection, incarnation=0, received=0, epoch=0, name="")
    refused = links.accept(hello, lambda _: 1)
    assert isinstance(refused, Reject)
    assert refused.code is RejectCode.INVALID


def test_a_gap_breaks_the_connection() -> None:
    client: ClientLink[str] = ClientLink(KEY, "c")
    link = attach(client, ServerLinks(1, 1))
    with pytest.raises(LinkBroken, match="message 2 after 0"):
        link.receive(Data(link.connection, 2, 0, "b"))
    assert link.received == 0


def test_an_impossible_acknowledgement_breaks_the_connection() -> None:
    client: ClientLink[str] = ClientLink(KEY, "c")
    link = attach(client, ServerLinks(1, 1))
    with pytest.raises(LinkBroken, match="acknowledged 5"):
        link.receive(Heartbeat(link.connection, 5))


def test_a_full_session_says_so_and_keeps_what_it_has() -> None:
    client: ClientLink[str] = ClientLink(KEY, "c", outbox_max=2)
    link = attach(client, ServerLinks(1, 1))
    client.post("1")
    client.post("2")
    with pytest.raises(LinkOverflow):
        client.post("3")
    assert [link.receive(frame) for frame in client.outgoing()] == [["1"], ["2"]]
    client.receive(link.heartbeat())
    client.post("3")
    assert [link.receive(frame) for frame in client.outgoing()] == [["3"]]


def test_a_renewed_client_starts_over_under_another_key() -> None:
    links: ServerLinks[str] = ServerLinks(1, 1)
    client: ClientLink[str] = ClientLink(KEY, "c")
    attach(client, links)
    client.post("lost")
    client.renew(b"n" * 16)
    accepted = links.accept(client.connect(), lambda _: 10)
    assert not isinstance(accepted, Reject)
    heard = client.receive(accepted.welcome)
    assert heard == Attached(fresh=True, epoch=10, server_epoch=1)
    assert client.outgoing() == []


def test_the_client_names_its_epoch_after_a_restart() -> None:
    client: ClientLink[str] = ClientLink(KEY, "c")
    attach(client, ServerLinks(1, 1), epoch=77)
    assert client.connect().epoch == 77


def test_a_pause_moves_deadlines_by_its_length() -> None:
    guard = PauseGuard(now_ns=0, tolerated_ns=100)
    assert guard.observe(100) == 0
    assert guard.observe(201) == 101
    assert guard.observe(202) == 0
