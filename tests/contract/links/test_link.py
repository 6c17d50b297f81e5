"""Sessions over real connections: reconnects, restarts, stale bytes, refusals."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from coppice.addresses import PortInUse, parse_session_address
from coppice.edge import link_client, link_server, session_listener
from coppice.edge.link_server import SessionRefused
from coppice.edge.session_listener import SessionListener
from coppice.messages.step import StepPlan, StepResult
from coppice.session.frames import Data, Heartbeat, Hello, Reject, RejectCode, Welcome
from coppice.session.link import ServerLinks
from tests.fakes.link_ends import ClientEnd, RawStream, ServerEnd
from tests.fakes.ports import free_port
from tests.fakes.tcp_proxy import TcpProxy
from tests.fakes.waiting import WAIT_S, wait_for

Keep = Callable[[Any], Any]
INCARNATIONS = itertools.count(1)
HELLO = Hello(key=b"r" * 16, connection=1, incarnation=0, received=0, epoch=0, name="raw")


def links(outbox_max: int = 65_536) -> ServerLinks[Any]:
    return ServerLinks(next(INCARNATIONS), server_epoch=5, outbox_max=outbox_max)


@pytest.fixture(autouse=True)
def _fast_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_client, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(link_server, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(link_client, "BACKOFF_LAST_S", 0.2)


def test_messages_arrive_in_order_in_both_directions(keep: Keep, listen_on: str) -> None:
    server = keep(ServerEnd(links(), listen_on))
    client = keep(ClientEnd(server.where))
    client.wait_attached()
    assert client.attached[0].fresh
    assert client.attached[0].server_epoch == 5
    for step in range(1, 301):
        client.post(step)
        server.post(step)
    wait_for(lambda: len(server.steps) == 300 and len(client.steps) == 300, "300 messages each way")
    assert server.steps == client.steps == list(range(1, 301))


def test_cut_connections_lose_and_double_nothing(keep: Keep) -> None:
    server = keep(ServerEnd(links()))
    proxy = keep(TcpProxy(server.port))
    client = keep(ClientEnd(proxy.port))
    client.wait_attached()
    cuts = 0
    for step in range(1, 401):
        client.post(step)
        server.post(step)
        if step % 80 == 0:
            cuts += proxy.cut()
    wait_for(lambda: len(server.steps) >= 400 and len(client.steps) >= 400, "everything in spite of cuts")
    assert cuts
    assert server.steps == client.steps == list(range(1, 401))
    assert [attached.fresh for attached in client.attached] == [True] + [False] * (len(client.attached) - 1)
    assert len(client.attached) > 1
    assert [is_new for _, is_new in server.connected].count(True) == 1
    assert client.attachment == 1


def test_a_restarted_server_is_another_incarnation(keep: Keep, listen_on: str) -> None:
    first = ServerEnd(links(), listen_on)
    client = keep(ClientEnd(first.where))
    client.wait_attached()
    client.post(1)
    wait_for(lambda: first.steps == [1], "the first message")
    first.stop()
    wait_for(lambda: client.lost, "the client notices")
    client.post(2)  # belongs to the session that died with the server
    second = keep(ServerEnd(links(), first.where))
    client.wait_attached(2)
    assert client.attached[1].fresh
    assert client.attachment == 2
    assert second.opened[0].epoch == 1, "the client names the epoch that it holds"
    client.link.post(StepPlan(3), 1)  # the application has not heard of the new attachment yet
    client.post(4)
    wait_for(lambda: second.steps, "a message under the new attachment")
    assert second.steps == [4]


def test_an_ended_session_opens_anew(keep: Keep, listen_on: str) -> None:
    server = keep(ServerEnd(links(), listen_on))
    client = keep(ClientEnd(server.where))
    client.wait_attached()
    server.server.end(server.newest(), Reject(RejectCode.FENCED, "you were silent"))
    client.wait_attached(2)
    assert client.rejected == [Reject(RejectCode.FENCED, "you were silent")]
    assert client.attached[1].fresh
    assert client.attached[1].epoch != client.attached[0].epoch
    assert [is_new for _, is_new in server.connected] == [True, True]


def test_bytes_of_a_dead_connection_are_ignored(keep: Keep, listen_on: str) -> None:
    server = keep(ServerEnd(links(), listen_on))
    old, new = keep(RawStream(server.where)), keep(RawStream(server.where))
    old.write(HELLO)
    welcome = old.read()
    assert isinstance(welcome, Welcome)
    new.write(replace(HELLO, connection=2, incarnation=welcome.incarnation))
    resumed = new.read()
    assert isinstance(resumed, Welcome)
    assert not resumed.fresh
    old.write(Data(1, 1, 0, StepPlan(66)))
    old.wait_end()
    new.write(Data(1, 1, 0, StepPlan(67)))  # names the dead connection on the new stream
    new.write(Data(2, 1, 0, StepPlan(1)))
    wait_for(lambda: server.steps, "the message of the new connection")
    assert server.steps == [1]


def test_an_older_connection_cannot_come_back(keep: Keep) -> None:
    server = keep(ServerEnd(links()))
    new, old = keep(RawStream(server.port)), keep(RawStream(server.port))
    new.write(replace(HELLO, connection=2))
    assert isinstance(new.read(), Welcome)
    old.write(replace(HELLO, connection=1))
    refused = old.read()
    assert isinstance(refused, Reject)
    assert refused.code is RejectCode.STALE_CONNECTION


@pytest.mark.parametrize("way", ["replaced", "ended"])
def test_bytes_for_a_session_that_is_over_are_ignored(keep: Keep, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    server = keep(ServerEnd(links()))
    stream = keep(RawStream(server.port))
    stream.write(HELLO)
    assert isinstance(stream.read(), Welcome)
    link = server.newest()
    decode, decoded = server.server._decode, threading.Event()

    def decode_and_tell(wire: Any) -> Any:
        decoded.set()
        return decode(wire)

    monkeypatch.setattr(server.server, "_decode", decode_and_tell)
    with server.server._delivering:  # the reader has the message in its hands and waits here
        stream.write(Data(1, 1, 0, StepPlan(66)))
        assert decoded.wait(WAIT_S)
        if way == "replaced":
            server.server.replace(links())
        else:
            server.server.end(link)
    stream.wait_end()
    wait_for(lambda: not reader_runs(), "the reader ends")
    assert link.received == 0
    assert server.steps == []


def reader_runs() -> bool:
    return any(thread.name == "session raw" for thread in threading.enumerate())


def test_a_lost_welcome_is_no_lost_session(keep: Keep) -> None:
    """The server forgot the session, opened it anew, and the client never heard of that."""
    server = keep(ServerEnd(links()))
    first = keep(RawStream(server.port))
    first.write(HELLO)
    welcome = first.read()
    server.post(1)
    while not isinstance(first.read(), Data):
        pass
    server.server.end(server.newest())
    first.wait_end()
    again = replace(HELLO, connection=2, incarnation=welcome.incarnation, received=1)
    unheard = keep(RawStream(server.port))
    unheard.write(again)
    wait_for(lambda: len(server.connected) == 2, "the session opens anew")
    unheard.close()
    server.post(2)
    last = keep(RawStream(server.port))
    last.write(replace(again, connection=3))
    fresh = last.read()
    assert isinstance(fresh, Welcome)
    assert fresh.fresh
    arrived = last.read()
    assert (arrived.number, arrived.body.step) == (1, 2)


@pytest.mark.parametrize("first", [Heartbeat(1, 0), Data(1, 1, 0, StepPlan(1))])
def test_a_session_starts_with_hello(keep: Keep, first: Any) -> None:
    stream = keep(RawStream(keep(ServerEnd(links())).port))
    stream.write(first)
    refused = stream.read()
    assert refused == Reject(RejectCode.INVALID, "a session starts with Hello")


def test_an_empty_first_frame_is_refused(keep: Keep) -> None:
    stream = keep(RawStream(keep(ServerEnd(links())).port))
    stream.write_bytes(b"")
    refused = stream.read()
    assert isinstance(refused, Reject)
    assert refused.code is RejectCode.INVALID


@pytest.mark.parametrize("broken", [Data(1, 3, 0, StepPlan(3)), Heartbeat(1, 50), HELLO])
def test_a_broken_protocol_costs_the_connection_not_the_session(keep: Keep, broken: Any) -> None:
    server = keep(ServerEnd(links()))
    stream, again = keep(RawStream(server.port)), keep(RawStream(server.port))
    stream.write(HELLO)
    welcome = stream.read()
    stream.write(Data(1, 1, 0, StepPlan(1)))
    stream.write(broken)
    stream.wait_end()
    again.write(replace(HELLO, connection=2, incarnation=welcome.incarnation))
    resumed = again.read()
    assert isinstance(resumed, Welcome)
    assert (resumed.fresh, resumed.received) == (False, 1)
    assert server.steps == [1]


def test_a_refusing_application_ends_the_session_and_says_why(keep: Keep) -> None:
    server = keep(ServerEnd(links()))
    client = keep(ClientEnd(server.port))
    client.wait_attached()

    def refuse(step: int) -> None:
        if step == 2:
            raise SessionRefused("no step 2 here")

    server.on_body = refuse
    for step in (1, 2, 3):
        client.link.post(StepPlan(step), 1)  # of this attachment: the third may come after its end
    client.wait_attached(2)
    assert [reject.message for reject in client.rejected] == ["no step 2 here"]
    assert server.steps == [1]
    assert client.attached[1].fresh


def test_a_bug_in_the_application_does_not_leave_a_deaf_session(keep: Keep, caplog: pytest.LogCaptureFixture) -> None:
    server = keep(ServerEnd(links()))
    client = keep(ClientEnd(server.port))
    client.wait_attached()

    def fail(step: int) -> None:
        raise ZeroDivisionError

    server.on_body = fail
    client.post(1)
    client.wait_attached(2)
    assert client.attached[1].fresh
    assert "could not be handled" in caplog.text


def test_a_server_that_is_not_ready_is_asked_again(keep: Keep) -> None:
    server = keep(ServerEnd(None))
    client = keep(ClientEnd(server.port))
    wait_for(lambda: client.rejected, "a refusal")
    assert client.rejected[0].code is RejectCode.NOT_READY
    server.server.replace(links())
    client.wait_attached()


def test_a_refused_opening_is_tried_again(keep: Keep) -> None:
    server = keep(ServerEnd(links()))
    server.refusal = Reject(RejectCode.FENCED, "not you")
    client = keep(ClientEnd(server.port))
    wait_for(lambda: len(server.opened) >= 3, "three attempts")
    assert [reject.message for reject in client.rejected] == ["not you"], "the same is told once"
    server.refusal = Reject(RejectCode.FENCED, "nor you")
    wait_for(lambda: len(client.rejected) >= 2, "another refusal")
    server.refusal = None
    client.wait_attached()


def test_a_silent_server_is_left(keep: Keep, monkeypatch: pytest.MonkeyPatch, listen_on: str) -> None:
    """It took the connection, and its process hangs: no heartbeat comes, though the connection is fine."""
    monkeypatch.setattr(link_client, "SUSPECT_S", 0.4)
    server = keep(ServerEnd(links(), listen_on))
    client = keep(ClientEnd(server.where))
    client.wait_attached()
    with server.server._lock:  # every writer of the server hangs
        for step in range(1, 60):
            client.post(step)  # a client that has much to say must notice, too
        wait_for(lambda: client.lost, "the client gives the connection up")
    client.wait_attached(2)
    assert not client.attached[1].fresh
    wait_for(lambda: len(server.steps) >= 59, "what was said meanwhile")
    assert server.steps == list(range(1, 60))


def test_idle_sessions_are_heard(keep: Keep) -> None:
    server = keep(ServerEnd(links()))
    client = keep(ClientEnd(server.port))
    client.wait_attached()
    before = server.heard
    wait_for(lambda: server.heard >= before + 3, "heartbeats of an idle client")
    assert len(client.attached) == 1


def test_a_client_whose_server_was_away_too_long_starts_over(keep: Keep) -> None:
    server = keep(ServerEnd(links()))
    proxy = keep(TcpProxy(server.port))
    client = keep(ClientEnd(proxy.port, outbox_max=10))
    client.wait_attached()
    proxy.down = True
    proxy.cut()
    wait_for(lambda: client.lost, "the outage")
    for step in range(1, 30):
        client.post(step)
    proxy.down = False
    client.wait_attached(2)
    assert client.attached[1].fresh
    client.post(100)
    wait_for(lambda: server.steps, "a message of the new session")
    assert server.steps == [100]


def test_a_client_that_is_away_too_long_loses_its_session(keep: Keep) -> None:
    server = keep(ServerEnd(links(outbox_max=10)))
    stream = keep(RawStream(server.port))
    stream.write(HELLO)
    assert isinstance(stream.read(), Welcome)
    link = server.newest()
    answers = [server.server.post(link, StepResult(step)) for step in range(1, 13)]  # nothing is acknowledged
    assert answers == [True] * 10 + [False] * 2
    assert link.is_ended
    stream.wait_end()


def test_posts_of_one_session_write_nothing_to_others(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_server, "HEARTBEAT_S", 30.0)
    server = keep(ServerEnd(links()))
    busy, idle = keep(RawStream(server.port)), keep(RawStream(server.port))
    busy.write(HELLO)
    assert isinstance(busy.read(), Welcome)
    link = server.newest()
    idle.write(replace(HELLO, key=b"i" * 16))
    assert isinstance(idle.read(), Welcome)
    for step in range(1, 51):
        server.server.post(link, StepResult(step))
    assert [busy.read().body.step for _ in range(50)] == list(range(1, 51))
    assert not idle.has_more


def test_streams_that_say_nothing_give_their_threads_back(
    keep: Keep, monkeypatch: pytest.MonkeyPatch, listen_on: str
) -> None:
    monkeypatch.setattr(session_listener, "CONNECTIONS_MAX", 3)
    server = keep(ServerEnd(links(), listen_on, hello_s=0.2))
    silent = [keep(RawStream(server.where)) for _ in range(3)]
    stream = keep(RawStream(server.where))
    stream.write(HELLO)
    assert isinstance(stream.read(), Welcome), "every thread waits for a Hello"
    for other in silent:
        other.wait_end()
    beats = [stream.read() for _ in range(5)]  # five tenths of a second, longer than a stream may be silent at first
    assert all(isinstance(beat, Heartbeat) for beat in beats)


def test_an_address_in_use_is_said(keep: Keep, listen_on: str) -> None:
    first = keep(ServerEnd(links(), listen_on))
    with pytest.raises(PortInUse, match=re.escape(f"cannot listen on {first.where} for sessions")):
        SessionListener(parse_session_address(first.where))
    keep(ClientEnd(first.where)).wait_attached()


def test_a_new_voucher_ends_the_pause_and_the_same_one_does_not(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who lists the server lists it anew when it is back, and with another voucher then."""
    port = free_port()
    monkeypatch.setattr(link_client, "BACKOFF_FIRST_S", 4 * WAIT_S)
    client = keep(ClientEnd(port))
    client.link.take_voucher(b"first")
    wait_for(lambda: client.num_refused == 2, "the second attempt")
    client.link.take_voucher(b"first")
    keep(ServerEnd(links(), f"127.0.0.1:{port}"))
    threading.Event().wait(0.3)
    assert (client.num_refused, client.attached) == (2, [])
    client.link.take_voucher(b"second")
    client.wait_attached()
