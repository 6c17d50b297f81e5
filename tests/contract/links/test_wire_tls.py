"""Sessions over TLS: whole messages whatever TLS does beneath them, and nobody speaks as somebody else."""

from __future__ import annotations

import logging
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coppice.edge import codec, link_client, session_listener, wire
from coppice.edge.wire import Wire, WireClosed, WireSilent, introduction
from coppice.session.link import ServerLinks
from coppice.tls.credentials import Credentials, TlsFiles
from coppice.tls.identity import Role
from tests.fakes.certificates import Authority, expired, replace
from tests.fakes.link_ends import ClientEnd, ServerEnd, shake_hands
from tests.fakes.waiting import WAIT_S, wait_for

Keep = Callable[[Any], Any]
MIB = 1 << 20
# Whose lines are counted: threads of an earlier test's server may still write theirs, about 127.0.0.1.
STRANGER = "127.0.0.7" if sys.platform == "linux" else "127.0.0.1"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@pytest.fixture
def ends(authority: Authority) -> Iterator[tuple[Wire, Wire]]:
    near, far = map(Wire, connected())
    shake_hands(near, authority.credentials("worker", "w0"), far, authority.credentials("cache", "c0"))
    for end in (near, far):
        end.trust()
    yield near, far
    near.close()
    far.close()


# ---- messages ----


def test_large_messages_go_both_ways_at_once_while_other_threads_write(ends: tuple[Wire, Wire]) -> None:
    sent = [bytes([number]) * (3 * MIB + number) for number in range(6)]
    found: dict[int, list[bytes]] = {0: [], 1: []}
    done = threading.Event()

    def read(number: int) -> None:
        """Whoever reads also sends what waits, so nobody stops before both are done."""
        while not done.wait(0):
            found[number] += ends[number].receive(0.05)
            if all(len(messages) == len(sent) + 50 for messages in found.values()):
                done.set()

    def small(number: int) -> None:
        for _ in range(50):
            ends[number].write(b"small")

    readers = [threading.Thread(target=read, args=(number,)) for number in (0, 1)]
    writers = [threading.Thread(target=small, args=(number,)) for number in (0, 1)]
    for thread in (*readers, *writers):
        thread.start()
    for message in sent:
        for end in ends:
            end.write(message)
    assert done.wait(WAIT_S)
    for thread in (*readers, *writers):
        thread.join(WAIT_S)
    for messages in found.values():
        assert [message for message in messages if message != b"small"] == sent


def test_nothing_of_a_message_is_readable_on_the_network(authority: Authority) -> None:
    (near, near_far), (far_near, far) = connected(), connected()
    client, server = Wire(near), Wire(far)
    seen = bytearray()

    def carry(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            seen.extend(data)
            target.sendall(data)

    carriers = [
        threading.Thread(target=carry, args=pair, daemon=True) for pair in ((near_far, far_near), (far_near, near_far))
    ]
    for carrier in carriers:
        carrier.start()
    shake_hands(client, authority.credentials("worker", "w0"), server, authority.credentials("cache", "c0"))
    client.write(b"a secret prompt")
    assert server.next(WAIT_S) == b"a secret prompt"
    assert seen
    assert b"secret prompt" not in seen
    for end in (client, server, near_far, far_near):
        end.close()


def test_the_backlog_counts_what_goes_over_the_network(authority: Authority) -> None:
    near, far = connected()
    writer, deaf = Wire(near, backlog_bytes_max=MIB), Wire(far)
    shake_hands(writer, authority.credentials("worker", "w0"), deaf, authority.credentials("cache", "c0"))
    for _ in range(64):
        writer.write(bytes(MIB))
    with pytest.raises(WireClosed):
        writer.next(WAIT_S)
    writer.close()
    deaf.close()


def test_what_comes_with_the_end_of_the_handshake_is_read(authority: Authority) -> None:
    """The client's last word of the handshake and its first message may be one piece."""
    near, far = connected()
    client = authority.credentials("worker", "w0").channel(is_server=False)
    server = Wire(far)
    accepting = threading.Thread(
        target=lambda: server.start_tls(authority.credentials("cache", "c0").channel(is_server=True), WAIT_S)
    )
    accepting.start()
    assert not client.shake_hands()
    near.sendall(client.outgoing())
    while not client.shake_hands():
        client.feed(near.recv(1 << 16))
    near.sendall(client.outgoing() + client.sealed(wire.packed(b"first")))
    accepting.join(WAIT_S)
    assert server.next(WAIT_S) == b"first"
    near.close()
    server.close()


# ---- handshakes that fail ----


def test_who_never_shakes_hands_is_waited_for_no_longer_than_said(authority: Authority) -> None:
    near, far = connected()
    server = Wire(far)
    with pytest.raises(WireSilent):
        server.start_tls(authority.credentials("cache", "c0").channel(is_server=True), 0.05)
    near.close()
    server.close()


def test_who_leaves_in_the_middle_of_the_handshake_is_noticed(authority: Authority) -> None:
    near, far = connected()
    server = Wire(far)
    client = authority.credentials("worker", "w0").channel(is_server=False)
    client.shake_hands()
    near.sendall(client.outgoing()[:100])
    near.close()
    with pytest.raises(WireClosed):
        server.start_tls(authority.credentials("cache", "c0").channel(is_server=True), WAIT_S)
    server.close()


def test_a_handshake_that_hangs_keeps_nobody_else_out(keep: Keep, authority: Authority) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1), tls=authority.credentials("worker", "w0")))
    hanging = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
    keep(ClientEnd(server.port, tls=authority.credentials("scheduler", "s0"))).wait_attached()
    for one in hanging:
        one.close()


def test_a_silent_connection_gives_its_thread_back(
    keep: Keep, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_listener, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(session_listener, "INTRODUCTION_S", 1.0)
    monkeypatch.setattr(wire, "_FINISH_S", 0.2)
    server = keep(ServerEnd(ServerLinks(1, 1), tls=authority.credentials("worker", "w0")))
    with socket.create_connection(("127.0.0.1", server.port)):
        keep(ClientEnd(server.port, tls=authority.credentials("scheduler", "s0"))).wait_attached()


@pytest.mark.parametrize("first", [introduction("steps"), b"GET / HTTP/1.1\r\n\r\n", bytes(5_000)])
def test_who_speaks_no_tls_is_sent_away(
    keep: Keep, authority: Authority, caplog: pytest.LogCaptureFixture, first: bytes
) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1), tls=authority.credentials("worker", "w0")))
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port), WAIT_S, (STRANGER, 0)) as plain:
            plain.sendall(first)
            plain.shutdown(socket.SHUT_WR)
            while plain.recv(1 << 16):
                pass
    assert not server.opened
    assert caplog.text.count(f"a connection was refused, from {STRANGER}") == 1


def test_a_client_without_tls_is_sent_away_and_the_server_says_so(
    keep: Keep, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1), tls=authority.credentials("worker", "w0")))
    client = keep(ClientEnd(server.port))
    wait_for(lambda: "does not speak TLS" in caplog.text, "a word about TLS")
    assert not server.opened
    assert not client.attached


def test_a_client_with_tls_does_not_speak_to_a_server_without(
    keep: Keep, authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(link_client, "OUTAGE_TOLD_S", 0.0)
    server = keep(ServerEnd(ServerLinks(1, 1)))
    client = keep(ClientEnd(server.port, tls=authority.credentials("scheduler", "s0")))
    wait_for(lambda: "during the handshake of TLS; does that port want it?" in caplog.text, "a word about it")
    assert not server.opened
    assert not client.attached


def only_tls_1_2(authority: Authority) -> ssl.SSLContext:
    files = authority.files("scheduler", "old")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(files.ca)
    context.load_cert_chain(files.certificate, files.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def test_older_versions_of_tls_are_refused(keep: Keep, authority: Authority) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1), tls=authority.credentials("worker", "w0")))
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as plain, pytest.raises(ssl.SSLError):
        only_tls_1_2(authority).wrap_socket(plain)


# ---- who is who ----


def refused(caplog: pytest.LogCaptureFixture, text: str) -> None:
    wait_for(lambda: text in caplog.text, f"a word about: {text}")


def test_a_certificate_of_another_ca_opens_nothing(
    keep: Keep, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").mkdir()
    files = Authority(tmp_path / "other").files("scheduler", "s0")
    stranger = Credentials(TlsFiles(files.certificate, files.key, tmp_path / "ca.pem"), Role.SCHEDULER)
    server = keep(ServerEnd(ServerLinks(1, 1), tls=authority.credentials("worker", "w0")))
    client = keep(ClientEnd(server.port, tls=stranger))
    refused(caplog, "the other side refuses our certificate")
    refused(caplog, "a connection was refused, from 127.0.0.1: the certificate of the other side is refused")
    assert not server.opened
    assert not client.attached


def test_a_server_of_another_ca_is_told_nothing(
    keep: Keep, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other").credentials("worker", "w0")
    server = keep(ServerEnd(ServerLinks(1, 1), tls=stranger))
    keep(ClientEnd(server.port, tls=authority.credentials("scheduler", "s0")))
    refused(caplog, "client to server: 127.0.0.1")
    assert not server.opened


def test_an_expired_certificate_opens_nothing(
    keep: Keep, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1), tls=authority.credentials("worker", "w0")))
    late = Credentials(authority.files("scheduler", "s0", lifetime=expired()), Role.SCHEDULER)
    keep(ClientEnd(server.port, tls=late))
    refused(caplog, "certificate has expired")
    assert not server.opened


@pytest.mark.parametrize(("role", "edge"), [("worker", codec.STEPS), ("operator", codec.STEPS), ("cache", codec.INDEX)])
def test_the_wrong_role_opens_no_session(
    keep: Keep, authority: Authority, caplog: pytest.LogCaptureFixture, role: str, edge: codec.Edge
) -> None:
    serving = "worker" if edge is codec.STEPS else "cache"
    server = keep(ServerEnd(ServerLinks(1, 1), tls=authority.credentials(serving, "x"), edge=edge))
    client = keep(ClientEnd(server.port, tls=authority.credentials(role, "y"), edge=edge))
    wait_for(lambda: client.rejected, "a refusal")
    assert f"coppice://{role}/y may not open sessions of the kind" in client.rejected[0].message
    attempts = client.link._link.connection
    wait_for(lambda: client.link._link.connection > attempts + 1, "more attempts")
    assert caplog.text.count("a session was refused") == 1
    assert not server.opened


def test_a_worker_registers_under_no_name_but_its_own(keep: Keep, authority: Authority) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1), tls=authority.credentials("cache", "c0"), edge=codec.WORKERS))
    rogue = authority.credentials("worker", "rogue")
    client = keep(ClientEnd(server.port, tls=rogue, edge=codec.WORKERS, name="w0"))
    wait_for(lambda: client.rejected, "a refusal")
    assert "may not speak as worker 'w0'; its certificate is for 'rogue'" in client.rejected[0].message
    assert not server.opened
    keep(ClientEnd(server.port, tls=rogue, edge=codec.WORKERS, name="rogue")).wait_attached()


@pytest.mark.parametrize(("role", "name"), [("cache", "w0"), ("worker", "w1")])
def test_a_client_speaks_to_nobody_but_whom_it_wants(
    keep: Keep, authority: Authority, caplog: pytest.LogCaptureFixture, role: str, name: str
) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1), tls=authority.credentials(role, name)))
    keep(ClientEnd(server.port, tls=authority.credentials("scheduler", "s0"), certified="w0"))
    refused(caplog, f"coppice://{role}/{name} answers there in place of coppice://worker/w0")
    assert not server.opened


# ---- sessions, and certificates that change ----


def test_bodies_go_both_ways(keep: Keep, authority: Authority) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1), tls=authority.credentials("worker", "w0")))
    client = keep(ClientEnd(server.port, tls=authority.credentials("scheduler", "s0"), certified="w0"))
    client.wait_attached()
    for step in range(1, 101):
        client.post(step)
        server.post(step)
    wait_for(lambda: len(server.steps) == 100 and len(client.steps) == 100, "all bodies")
    assert server.steps == client.steps == list(range(1, 101))


def test_a_session_goes_on_under_new_certificates(
    keep: Keep, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = keep(ServerEnd(ServerLinks(1, 1), tls=authority.credentials("worker", "w0")))
    client = keep(ClientEnd(server.port, tls=authority.credentials("scheduler", "s0")))
    client.wait_attached()
    client.post(1)
    wait_for(lambda: server.steps == [1], "a body")
    changed = Authority(authority.folder)  # another CA: only who reads all files again can speak now
    changed.files("worker", "w0")
    changed.files("scheduler", "s0")
    client.link._abort()
    client.wait_attached(2)
    client.post(2)
    wait_for(lambda: server.steps == [1, 2], "the next body of the same session")
    assert caplog.text.count("TLS files changed") == 2


def test_a_bad_file_stops_nobody(keep: Keep, authority: Authority) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1), tls=authority.credentials("worker", "w0")))
    client = keep(ClientEnd(server.port, tls=authority.credentials("scheduler", "s0")))
    client.wait_attached()
    for path in authority.folder.iterdir():
        replace(path, b"nonsense")
    client.link._abort()
    client.wait_attached(2)


def test_on_a_local_socket_there_is_no_tls() -> None:
    near, far = map(Wire, socket.socketpair())
    assert near.is_local
    near.write(b"plain")
    assert far.next(WAIT_S) == b"plain"
    near.close()
    far.close()
