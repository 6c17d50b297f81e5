"""Messages over real connections: whole and in order, whatever their sizes; wrong peers are told apart."""

from __future__ import annotations

import http.client
import itertools
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from coppice.addresses import Address
from coppice.edge import acceptor, codec, link_server, session_listener, wire
from coppice.edge.grpc_server import GrpcServer
from coppice.edge.link_server import LinkServer
from coppice.edge.session_listener import SessionListener
from coppice.edge.wire import MESSAGE_BYTES_MAX, MessageTooLong, Wire, WireClosed, WireGarbled, WireSilent, introduction
from coppice.session.frames import Hello, Welcome
from coppice.session.link import ServerLinks
from tests.fakes.certificates import Authority
from tests.fakes.link_ends import ClientEnd, RawStream, ServerEnd, shake_hands
from tests.fakes.waiting import WAIT_S, wait_for

Keep = Callable[[Any], Any]
FIRST = introduction("steps")


def connected(kind: str = "tcp") -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["plain", "tls"])
def ends(request: pytest.FixtureRequest, authority: Authority) -> Iterator[tuple[Wire, Wire]]:
    """Two ends that have heard each other's first message."""
    near, far = map(Wire, connected())
    if request.param == "tls":
        shake_hands(near, authority.credentials("worker", "w0"), far, authority.credentials("cache", "c0"))
    for one, other in ((near, far), (far, near)):
        one.write(FIRST)
        assert other.next(WAIT_S) == FIRST
        other.trust()
    yield near, far
    near.close()
    far.close()


def received(end: Wire, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        found += end.receive(WAIT_S)
    return found


def test_messages_of_all_sizes_stay_whole_and_in_order(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    sent = [bytes([size % 251]) * size for size in (0, 1, 3, 4, 5, 1 << 16, (1 << 18) + 1, 0, 7)]
    near.write(*sent)
    assert received(far, len(sent)) == sent


def test_a_message_may_come_byte_by_byte() -> None:
    near, far = connected()
    end = Wire(far)
    data = b"".join(len(part).to_bytes(4, "little") + part for part in (FIRST, b"abc", b"de"))
    sender = threading.Thread(target=lambda: [near.sendall(data[at : at + 1]) for at in range(len(data))])
    sender.start()
    assert (end.next(WAIT_S), end.next(WAIT_S), end.next(WAIT_S)) == (FIRST, b"abc", b"de")
    sender.join()
    end.close()
    near.close()


def test_what_the_peer_does_not_read_waits_and_blocks_nobody(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    large = [bytes([number]) * (1 << 22) for number in range(8)]  # far more than the kernel takes
    for message in large:
        near.write(message)
    near.write(b"last")
    sending = threading.Thread(target=lambda: [near.receive(0.05) for _ in range(400) if near._unsent], daemon=True)
    sending.start()
    assert received(far, 9) == [*large, b"last"]
    sending.join(WAIT_S)


def test_writers_of_several_threads_do_not_mix(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    writers = [
        threading.Thread(target=lambda name=name: [near.write(bytes([name]) * 999) for _ in range(200)])
        for name in range(4)
    ]
    for writer in writers:
        writer.start()
    flushing = threading.Thread(target=lambda: [near.receive(0.01) for _ in range(100)], daemon=True)
    flushing.start()
    found = received(far, 800)
    assert {len(message) for message in found} == {999}
    assert all(len(set(message)) == 1 for message in found)
    for writer in [*writers, flushing]:
        writer.join()


def test_waking_ends_the_wait(ends: tuple[Wire, Wire]) -> None:
    near, _ = ends
    waker = threading.Timer(0.05, near.wake)
    waker.start()
    assert near.receive(WAIT_S) == []
    waker.join()


def test_nothing_in_time_is_said(ends: tuple[Wire, Wire]) -> None:
    assert ends[0].receive(0.01) == []
    with pytest.raises(WireSilent):
        ends[0].next(0.01)


@pytest.mark.parametrize("how", ["close", "abort"])
def test_an_end_that_goes_is_noticed_and_writing_to_it_is_harmless(ends: tuple[Wire, Wire], how: str) -> None:
    near, far = ends
    getattr(far, how)()
    with pytest.raises(WireClosed):
        near.receive(WAIT_S)
    for _ in range(3):
        near.write(b"into the void")
    near.close()
    near.write(b"after the end")
    near.wake()
    near.abort()


def test_aborting_wakes_the_own_reader(ends: tuple[Wire, Wire]) -> None:
    near, _ = ends
    threading.Timer(0.05, near.abort).start()
    with pytest.raises(WireClosed):
        near.receive(WAIT_S)


def test_what_was_written_last_is_read_though_the_writer_left_bytes_unread(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    near.write(b"unread" * 1_000)
    far.write(b"farewell")
    finishing = threading.Thread(target=far.finish)
    finishing.start()
    assert near.receive(WAIT_S) == [b"farewell"]
    near.close()
    finishing.join(WAIT_S)
    assert not finishing.is_alive()


def test_a_message_that_is_too_long_ends_it_before_it_is_read(ends: tuple[Wire, Wire]) -> None:
    near, far = ends
    raw = (MESSAGE_BYTES_MAX + 1).to_bytes(4, "little")
    near._socket.send(raw if near._tls is None else near._tls.sealed(raw))
    with pytest.raises(WireGarbled, match="at most"):
        far.receive(WAIT_S)


# ---- who listens there ----


def test_who_has_no_session_cannot_send_much(keep: Keep) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1)))
    stream = keep(RawStream(server.port))
    stream.write_bytes(bytes(5_000))
    assert stream.read() is None
    assert not server.opened


def test_a_grpc_port_is_named_once(keep: Keep, caplog: pytest.LogCaptureFixture) -> None:
    grpc = GrpcServer("127.0.0.1:0", (), None, "other")
    grpc.start()
    with caplog.at_level(logging.WARNING):
        client = keep(ClientEnd(grpc.port))
        wait_for(lambda: "is it the gRPC port?" in caplog.text, "a word about the port")
        attempts = client.link._link.connection
        wait_for(lambda: client.link._link.connection > attempts + 2, "more attempts")
    assert caplog.text.count("is it the gRPC port?") == 1
    assert not client.rejected
    grpc.stop(0)


def test_a_port_of_another_service_is_named(keep: Keep, caplog: pytest.LogCaptureFixture) -> None:
    other = codec.Edge("index", codec.STEPS.from_client, codec.STEPS.from_server)
    listener = SessionListener(Address("127.0.0.1", 0))
    listener.start((LinkServer(ServerLinks(1, 1), other, ServerEnd(None)),))
    keep(ClientEnd(str(listener.address)))
    wait_for(lambda: "no sessions of the kind 'steps', but of ['index']" in caplog.text, "a word about the port")
    listener.close()


def test_a_browser_is_sent_away(keep: Keep) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1)))
    browser = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    browser.request("GET", "/")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        browser.getresponse()
    browser.close()
    assert not server.opened


def test_who_never_says_anything_gives_the_thread_back(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_listener, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(session_listener, "INTRODUCTION_S", 0.2)
    monkeypatch.setattr(wire, "_FINISH_S", 0.2)
    server = keep(ServerEnd(ServerLinks(1, 1)))
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
    stream = keep(RawStream(server.port))
    stream.write(Hello(key=b"r" * 16, connection=1, incarnation=0, received=0, epoch=0, name="raw"))
    assert isinstance(stream.read(), Welcome)
    for one in silent:
        one.close()


def test_a_client_that_vanished_is_let_go(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_server, "SILENT_S", 0.3)
    monkeypatch.setattr(link_server, "HEARTBEAT_S", 0.1)
    server = keep(ServerEnd(ServerLinks(next(itertools.count(1)), 1)))
    stream = keep(RawStream(server.port))
    stream.write(Hello(key=b"r" * 16, connection=1, incarnation=0, received=0, epoch=0, name="raw"))
    assert isinstance(stream.read(), Welcome)
    stream.wait_end()
    assert server.newest().connection == 1, "its session waits for it"


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_who_does_not_read_is_cut_off(kind: str) -> None:
    near, far = connected(kind)
    writer, deaf = Wire(near, backlog_bytes_max=1 << 20), Wire(far)
    for _ in range(64):
        writer.write(bytes(1 << 20))
    with pytest.raises(WireClosed):
        writer.next(WAIT_S)
    writer.close()
    deaf.close()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_one_large_message_may_wait(kind: str) -> None:
    near, far = connected(kind)
    writer, reader = Wire(near, backlog_bytes_max=1), Wire(far)
    reader.trust()
    writer.write(bytes(32 << 20))
    sending = threading.Thread(target=lambda: [writer.receive(0.01) for _ in range(6_000) if writer._unsent])
    sending.start()
    assert [len(message) for message in received(reader, 1)] == [32 << 20]
    sending.join(WAIT_S)
    writer.close()
    reader.close()


def test_another_version_is_named(
    keep: Keep, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_listener, "introduction", lambda *kinds: b"coppice/1 steps")
    server = keep(ServerEnd(ServerLinks(1, 1)))
    client = keep(ClientEnd(server.port))
    wait_for(lambda: "says b'coppice/1 steps' in place of 'coppice/2'" in caplog.text, "a word about the version")
    assert not client.attached


def test_what_no_peer_would_take_is_not_sent(ends: tuple[Wire, Wire]) -> None:
    with pytest.raises(MessageTooLong):
        ends[0].write(bytes(MESSAGE_BYTES_MAX + 1))


def test_a_listener_out_of_descriptors_keeps_its_places_and_takes_who_comes_later(
    keep: Keep, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(session_listener, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.01)
    failures = iter([OSError("too many open files")] * 5)

    class FailingWire(Wire):
        def __init__(self, connection: socket.socket) -> None:
            for failure in failures:
                raise failure
            super().__init__(connection)

    monkeypatch.setattr(session_listener, "Wire", FailingWire)
    server = keep(ServerEnd(ServerLinks(1, 1)))
    keep(ClientEnd(server.port)).wait_attached()
    assert caplog.text.count("too many open files") == 5
