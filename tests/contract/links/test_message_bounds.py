"""Each kind of session has a longest message for each direction: longer ones are not read, and never sent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from coppice.addresses import Address
from coppice.edge import codec, link_server
from coppice.edge.codec import Edge
from coppice.edge.link_client import LinkClient
from coppice.edge.link_server import LinkServer
from coppice.edge.session_listener import SessionListener
from coppice.edge.wire import BACKLOG_MESSAGES, Wire, WireClosed, introduction
from coppice.messages.step import StepPlan, StepResult
from coppice.session.frames import Heartbeat, Hello, Welcome
from coppice.session.link import ServerLinks
from tests.fakes.link_ends import ClientEnd, ServerEnd
from tests.fakes.waiting import WAIT_S, wait_for

Keep = Callable[[Any], Any]
EDGES = [codec.INDEX, codec.WORKERS, codec.STEPS]
each_kind = pytest.mark.parametrize("edge", EDGES, ids=lambda edge: edge.kind)
SHORT = 4_000


def announce(connection: socket.socket, num_bytes: int) -> None:
    connection.sendall(num_bytes.to_bytes(4, "little"))


# ---- what is read


class Welcoming:
    """A server that takes everybody."""

    def session_opening(self, hello: Hello) -> int:
        return 1

    def session_connected(self, link: Any, is_new: bool) -> None: ...

    def session_heard(self, link: Any) -> None: ...

    def session_body(self, link: Any, body: Any) -> None: ...


@pytest.fixture
def attached(keep: Keep) -> Callable[[Edge], tuple[socket.socket, Wire]]:
    """A raw client with a session of this kind at a real server."""

    def attach(edge: Edge) -> tuple[socket.socket, Wire]:
        listener = keep(SessionListener(Address("127.0.0.1", 0)))
        listener.start((keep(LinkServer(ServerLinks(1, 1), edge, Welcoming())),))
        connection = socket.create_connection(("127.0.0.1", listener.address.port))
        wire = keep(Wire(connection))
        wire.write(introduction(edge.kind), edge.from_client.encode(Hello(b"k" * 16, 1, 0, 0, 0, "raw")))
        wire.next(WAIT_S)
        assert isinstance(edge.from_server.decode(wire.next(WAIT_S)), Welcome)
        return connection, wire

    return attach


@each_kind
def test_a_server_ends_a_connection_that_announces_more(
    edge: Edge, attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_server, "HEARTBEAT_S", 0.05)
    connection, wire = attached(edge)
    announce(connection, edge.client_bytes_max + 1)
    with pytest.raises(WireClosed):
        _read_on(wire)


def _read_on(wire: Wire) -> None:
    """For so many heartbeats that it would have waited for the rest."""
    for _ in range(100):
        wire.next(WAIT_S)


@each_kind
def test_a_server_waits_for_what_is_just_short_enough(
    edge: Edge, attached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_server, "HEARTBEAT_S", 0.05)
    connection, wire = attached(edge)
    announce(connection, edge.client_bytes_max)
    for _ in range(5):
        assert isinstance(edge.from_server.decode(wire.next(WAIT_S)), Heartbeat)


class Heard:
    """What an application hears of a link."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.attached = threading.Event()

    def link_attached(self, attached: Any, attachment: int) -> None:
        self.attached.set()

    def link_lost(self, reason: str) -> None:
        self.lost.append(reason)

    def link_body(self, body: Any, attachment: int) -> None: ...

    def link_rejected(self, reject: Any) -> None: ...


@each_kind
def test_a_client_leaves_a_server_that_announces_more(edge: Edge, keep: Keep) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        heard = Heard()
        link = keep(LinkClient(edge, f"127.0.0.1:{listener.getsockname()[1]}", heard, "client", "server"))
        link.start()
        connection, _ = listener.accept()
        wire = keep(Wire(connection))
        assert wire.next(WAIT_S) == introduction(edge.kind)
        assert isinstance(edge.from_client.decode(wire.next(WAIT_S)), Hello)
        wire.write(introduction(edge.kind), edge.from_server.encode(Welcome(1, 1, 1, 1, 0, True)))
        assert heard.attached.wait(WAIT_S)
        announce(connection, edge.server_bytes_max + 1)
        wait_for(lambda: heard.lost, "it to leave")
        assert f"at most {edge.server_bytes_max} are taken" in heard.lost[0]


# ---- what is sent


SHORT_STEPS = replace(codec.STEPS, client_bytes_max=SHORT, server_bytes_max=SHORT)


def test_a_client_gives_up_a_session_that_cannot_say_something(keep: Keep) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1), edge=SHORT_STEPS))
    client = keep(ClientEnd(server.port, edge=SHORT_STEPS))
    client.wait_attached()
    client.link.post(StepPlan(1, zero=bytes(SHORT)), client.attachment)
    client.wait_attached(2)
    assert client.attached[1].fresh, "resumed, it would have to say the same"
    client.post(2)
    wait_for(lambda: server.steps == [2], "the next session")


def test_so_it_does_when_it_comes_back_with_something_to_say(keep: Keep) -> None:
    """Posted while it was away, and too long for the connection that comes then."""
    server = ServerEnd(ServerLinks(1, 1), edge=SHORT_STEPS)
    client = keep(ClientEnd(server.port, edge=SHORT_STEPS))
    client.wait_attached()
    client.post(1)
    wait_for(lambda: server.steps == [1], "the session")
    links = server.server._links
    server.stop()
    wait_for(lambda: client.lost, "it to notice")
    client.link.post(StepPlan(2, zero=bytes(SHORT)), client.attachment)
    again = keep(ServerEnd(links, server.where, edge=SHORT_STEPS))
    client.wait_attached(3)
    assert [attached.fresh for attached in client.attached] == [True, False, True]
    client.post(3)
    wait_for(lambda: again.steps == [3], "the next session")


def test_a_server_ends_a_session_to_which_it_cannot_say_something(keep: Keep) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1), edge=SHORT_STEPS))
    client, other = keep(ClientEnd(server.port, edge=SHORT_STEPS)), keep(ClientEnd(server.port, edge=SHORT_STEPS))
    client.wait_attached()
    other.wait_attached()
    link = server.connected[0][0]
    assert not server.server.post(link, StepResult(1, sampled_ids=bytes(SHORT)))
    assert link.is_ended
    wait_for(lambda: len(client.attached) + len(other.attached) == 3, "one of them to come back")
    for each in (client, other):
        each.post(5)
    wait_for(lambda: server.steps == [5, 5], "both go on")


def test_what_may_wait_for_a_deaf_peer_goes_by_the_longest_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = Wire(socket.create_connection(listener.getsockname()))
        deaf, _ = listener.accept()
    near.trust(takes=SHORT, sends=1 << 20)
    for _ in range(64):
        near.write(bytes(1 << 20))
    assert len(near._unsent) <= (BACKLOG_MESSAGES + 2) << 20
    with pytest.raises(WireClosed):
        near.next(WAIT_S)
    near.close()
    deaf.close()


def test_every_kind_is_within_what_a_connection_is_made_for() -> None:
    for edge in EDGES:
        assert max(edge.client_bytes_max, edge.server_bytes_max) <= codec.MESSAGE_BYTES_MAX
