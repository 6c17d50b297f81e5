"""Who is taken at --dist-init-addr, and who is not: strangers, the silent, the loud, other terms, another life."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coppice.addresses import Address
from coppice.edge.session_socket import connect
from coppice.edge.wire import Wire, WireClosed, packed
from coppice.errors import UnavailableError
from coppice.tls.credentials import Credentials
from coppice_worker.edge.draining import StopRequests
from coppice_worker.edge.settings import WorkerSettings
from coppice_worker.parallel.errors import NodeRefused, StoppedEarly, TermsDiffer
from coppice_worker.parallel.nodes import listener
from coppice_worker.parallel.nodes.handshake import Answer, Comer, introduce
from coppice_worker.parallel.nodes.link import Kind, Link
from coppice_worker.parallel.nodes.listener import NodeListener
from tests.fakes.certificates import Authority
from tests.fakes.ports import free_port
from tests.fakes.waiting import wait_for

TERMS = {"--block-size": "16", "--dtype": "float32", "the checkpoint's digest": "ab"}
NODE = Comer(node=1, terms=TERMS)
WAIT_S = 60.0


class Meeting:
    """A listener of a worker on two nodes with four ranks, and what it told of."""

    def __init__(self, tls: Credentials | None, handshake_s: float) -> None:
        self.stopping = StopRequests()
        self.taken: list[Comer] = []
        self.lost: list[tuple[str, str]] = []
        settings = WorkerSettings(model="none", nnodes=2, tensor_parallel=4, dist_init_addr=f"127.0.0.2:{free_port()}")
        self.address = settings.meets_at
        self.listener = NodeListener(
            settings,
            TERMS,
            tls,
            self.stopping,
            lambda comer, _: self.taken.append(comer),
            lambda *lost: self.lost.append(lost),
            handshake_s=handshake_s,
        )

    def come(self, comer: Comer, tls: Credentials | None = None) -> tuple[Wire, str]:
        """The connection, and the life's name. Raises what `introduce` does."""
        wire = Wire(connect(self.address, WAIT_S))
        try:
            return wire, introduce(wire, comer, tls)
        except BaseException:
            wire.close()
            raise


@contextmanager
def meeting(tls: Credentials | None = None, handshake_s: float = WAIT_S) -> Iterator[Meeting]:
    made = Meeting(tls, handshake_s)
    try:
        yield made
    finally:
        made.listener.close()


def closes(connection: socket.socket) -> bool:
    """The other side lets go of it, by whichever means."""
    connection.settimeout(WAIT_S)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_a_node_and_its_ranks_are_taken_and_then_nobody_else() -> None:
    with meeting() as at:
        waiting = threading.Thread(target=at.listener.wait)
        waiting.start()
        _, life = at.come(NODE)
        assert len(life) == 32
        for rank in (2, 3):
            at.come(Comer(node=1, rank=rank, life=life, terms=TERMS))
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
        assert [(comer.node, comer.rank) for comer in at.taken] == [(1, None), (1, 2), (1, 3)]
        with pytest.raises(OSError, match="refused"):
            connect(at.address, WAIT_S)


def test_each_life_has_a_name_of_its_own() -> None:
    with meeting() as one, meeting() as other:
        assert one.listener.life != other.listener.life
        _, life = one.come(NODE)
        other.come(NODE)
        with pytest.raises(NodeRefused, match="rank 2 of node 1 belongs to an earlier life of this worker"):
            other.come(Comer(node=1, rank=2, life=life, terms=TERMS))
        assert len(other.taken) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"--block-size": "32"}, "--block-size is 16 at node 0 and 32 at node 1"),
        ({"the checkpoint's digest": "cd"}, "the checkpoint's digest is ab at node 0 and cd at node 1"),
        ({"--what": "1"}, "node 1 names terms that node 0 does not know"),
    ],
)
def test_other_terms_are_refused_by_name(
    change: dict[str, str], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    with meeting() as at:
        with pytest.raises(TermsDiffer, match=sentence):
            at.come(Comer(node=1, terms={**TERMS, **change}))
        wait_for(lambda: sentence in caplog.text, "the log to say so")
        assert not at.taken
        at.come(NODE)  # who comes with the right ones is taken


@pytest.mark.parametrize(
    ("comer", "sentence"),
    [
        (Comer(node=5, terms=TERMS), "there are 2 nodes, counted from 0, and no node 5"),
        (NODE, r"node 1 \(127.0.0.1\) is here already"),
    ],
)
def test_who_has_no_place_is_refused(comer: Comer, sentence: str) -> None:
    with meeting() as at:
        at.come(NODE)
        with pytest.raises(NodeRefused, match=sentence):
            at.come(comer)


@pytest.mark.parametrize("rank", [1, 4])
def test_a_rank_belongs_to_one_node(rank: int) -> None:
    with meeting() as at:
        _, life = at.come(NODE)
        with pytest.raises(NodeRefused, match=f"there is no rank {rank} of node 1"):
            at.come(Comer(node=1, rank=rank, life=life, terms=TERMS))


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        packed(b"\x80\x04\x95"),
        packed(b'{"protocol": "coppice-ranks/1", "node": 1, "more": 2}'),
        packed(b'{"protocol": "coppice-ranks/9", "node": 1}'),
        (1 << 20).to_bytes(4, "little"),
    ],
    ids=["another protocol", "no text", "more than is asked", "another version", "too much"],
)
def test_a_stranger_is_let_go(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with meeting() as at:
        with socket.create_connection((at.address.host, at.address.port)) as stranger:
            stranger.sendall(said)
            assert closes(stranger)
        wait_for(lambda: "was refused, from 127.0.0.1" in caplog.text, "the log to say so")
        assert not at.taken
        assert not at.lost
        at.come(NODE)


@pytest.mark.parametrize("said", [b"", packed(b"x" * 100)[:50]], ids=["nothing", "half a message"])
def test_who_says_nothing_is_let_go_after_a_time(said: bytes) -> None:
    with meeting(handshake_s=0.2) as at:
        with socket.create_connection((at.address.host, at.address.port)) as stranger:
            stranger.sendall(said)
            assert closes(stranger)
        assert not at.taken


def test_no_more_than_so_many_are_at_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each is a thread; a node waits until strangers that say nothing are closed."""
    monkeypatch.setattr(listener, "HANDSHAKES_MAX", 2)
    with meeting() as at:
        silent = [socket.create_connection((at.address.host, at.address.port)) for _ in range(2)]
        comes = threading.Thread(target=at.come, args=(NODE,))
        comes.start()
        wait_for(lambda: "the most there may be; others wait" in caplog.text, "both places to be taken")
        assert comes.is_alive()
        assert at.taken == []
        for one in silent:
            one.close()
        comes.join(WAIT_S)
        wait_for(lambda: at.taken == [NODE], "it to be taken")


def test_over_tls_workers_alone_are_taken(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    (tmp_path / "other").mkdir()
    others = Authority(tmp_path / "other")
    with meeting(ours.credentials("worker", "worker-0")) as at:
        wire, _ = at.come(NODE, ours.credentials("worker", "worker-0-1"))
        assert wire.peer is not None
        assert str(wire.peer) == "coppice://worker/worker-0"
        for refused in (ours.credentials("scheduler", "scheduler-0"), others.credentials("worker", "worker-0"), None):
            with pytest.raises((NodeRefused, WireClosed)):
                at.come(NODE, refused)
        assert len(at.taken) == 1


def test_a_node_speaks_to_a_worker_alone(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    tls, no_worker = ours.credentials("worker", "worker-0-1"), ours.credentials("cache", "cache-0")
    text = "coppice://cache/cache-0 is no worker; ranks speak to workers alone"
    with meeting(no_worker) as at, pytest.raises(NodeRefused, match=text):
        at.come(NODE, tls)
    with socket.create_server(("127.0.0.2", free_port())) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(packed(b"coppice/2 index")), daemon=True).start()
        wire = Wire(connect(Address(*other.getsockname()), WAIT_S))
        with pytest.raises(NodeRefused, match="no worker that waits for other nodes"):
            introduce(wire, NODE, None)


def test_a_node_compares_terms_too() -> None:
    with socket.create_server(("127.0.0.2", free_port())) as other:
        answer = packed(Answer(life="ab", terms={**TERMS, "--dtype": "bfloat16"}).model_dump_json().encode())
        threading.Thread(target=lambda: other.accept()[0].sendall(answer), daemon=True).start()
        wire = Wire(connect(Address(*other.getsockname()), WAIT_S))
        with pytest.raises(TermsDiffer, match="--dtype is bfloat16 at node 0 and float32 at node 1"):
            introduce(wire, NODE, None)


def test_tls_is_of_version_1_3(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    with meeting(ours.credentials("worker", "worker-0")) as at:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            socket.create_connection((at.address.host, at.address.port)) as plain,
            pytest.raises((ssl.SSLError, ConnectionError)),
        ):
            context.wrap_socket(plain).recv(1)


def test_one_that_is_lost_is_named() -> None:
    with meeting() as at:
        wire, _ = at.come(NODE)
        wire.close()
        wait_for(lambda: at.lost, "the loss")
        assert at.lost == [("node 1 (127.0.0.1)", "the connection broke: closed by the other side")]


def test_one_that_falls_silent_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with meeting() as at:
        at.listener._silence_s = 0.1
        wire, _ = at.come(NODE)
        wait_for(lambda: at.lost, "the loss")
        assert at.lost[0][0] == "node 1 (127.0.0.1)"
        assert "it said nothing for" in at.lost[0][1]
        wire.close()


def test_it_says_for_whom_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with meeting() as at:
        ended: list[Any] = []
        waiting = threading.Thread(target=lambda: ended.append(outcome(at.listener.wait)))
        waiting.start()
        wait_for(lambda: f"waiting for node 1 at {at.address}" in caplog.text, "the node's name")
        _, life = at.come(NODE)
        at.come(Comer(node=1, rank=3, life=life, terms=TERMS))
        wait_for(lambda: f"waiting for rank 2 of node 1 at {at.address}" in caplog.text, "the rank's name")
        at.stopping.ask()
        waiting.join(WAIT_S)
        assert isinstance(ended[0], StoppedEarly)
        assert ended[0].exit_code == 0


def outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except Exception as error:
        return error


def test_a_port_that_is_taken_is_said() -> None:
    with meeting() as at:
        settings = WorkerSettings(model="none", nnodes=2, tensor_parallel=2, dist_init_addr=str(at.address))
        with pytest.raises(UnavailableError, match=f"cannot listen on {at.address}: Address already in use"):
            NodeListener(settings, TERMS, None, StopRequests(), lambda *_: None, lambda *_: None)


def test_a_name_that_is_not_known_yet_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stopping = StopRequests()
    settings = WorkerSettings(model="none", nnodes=2, tensor_parallel=2, dist_init_addr="node-0.invalid:29500")
    ended: list[Any] = []

    def listen() -> None:
        ended.append(outcome(lambda: NodeListener(settings, TERMS, None, stopping, lambda *_: None, lambda *_: None)))

    waiting = threading.Thread(target=listen)
    waiting.start()
    wait_for(lambda: "waiting for the name node-0.invalid to be known" in caplog.text, "the log")
    stopping.ask()
    waiting.join(WAIT_S)
    assert isinstance(ended[0], StoppedEarly)


def test_a_stop_at_another_node_is_heard_of() -> None:
    with meeting() as at:
        links: list[Link] = []
        heard = threading.Event()

        def taken(_: Comer, link: Link) -> None:
            link.on(Kind.STOP, lambda _: heard.set())
            links.append(link)

        at.listener._taken = taken
        wire, _ = at.come(NODE)
        Link(wire, "node 0").send(Kind.STOP)
        assert heard.wait(WAIT_S)
        links[0].bid_farewell()
        wire.close()
        wait_for(lambda: not any(t.name == "a node's connection" for t in threading.enumerate()), "its thread's end")
        assert not at.lost
