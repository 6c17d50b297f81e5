"""What comes over a session: bytes are cut into messages, messages are read, sessions count them; or it ends, with a
reason that is documented."""

from __future__ import annotations

import itertools
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from coppice.edge.codec import STEPS, Codec, MalformedFrame
from coppice.edge.wire import Splitter, WireGarbled, introduction, packed
from coppice.messages.step import StepPlan, StepResult
from coppice.session.frames import Data, Heartbeat, Hello, Reject, RejectCode, Welcome
from coppice.session.link import Accepted, Attached, ClientLink, LinkBroken, LinkOverflow, ServerLinks
from coppice.session.versions import PROTOCOL_VERSION
from tests.fakes.link_ends import ClientEnd, ServerEnd
from tests.fakes.message_values import CODECS
from tests.fakes.messages.golden import encoded
from tests.fakes.waiting import WAIT_S, wait_for
from tests.fuzz.fuzzing import LONG_S, corpus, fuzz

DURATIONS = [pytest.param(0.0, id="short"), pytest.param(LONG_S, id="long", marks=pytest.mark.long)]
KEY = b"k" * 16
INCARNATION = 1 << 32 | 7
LARGEST = 1 << 14  # message that is taken, in bytes
PIECE = 13  # bytes that arrive at a time
OUTBOX_MAX = 8
ENDS = (WireGarbled, MalformedFrame, LinkBroken, LinkOverflow)
HELLO = Hello(key=KEY, connection=1, incarnation=0, received=0, epoch=0, name="client")
WELCOME = Welcome(connection=1, incarnation=INCARNATION, epoch=1, server_epoch=5, received=0, fresh=True)


@pytest.mark.parametrize("for_s", DURATIONS)
@pytest.mark.parametrize("channel", CODECS)
def test_a_frame_is_a_message_or_malformed(channel: str, for_s: float) -> None:
    golden = [bytes.fromhex(frame) for frame in encoded([channel])[channel].values()]

    def target(content: bytes) -> None:
        try:
            message = CODECS[channel].decode(content)
        except MalformedFrame:
            return
        assert type(CODECS[channel].decode(CODECS[channel].encode(message))) is type(message)

    fuzz(target, [*golden, *corpus("frames")], for_s=for_s)


@pytest.mark.parametrize("for_s", DURATIONS)
def test_bytes_are_whole_messages_whatever_pieces_they_come_in(for_s: float) -> None:
    def target(content: bytes) -> None:
        try:
            at_once = list(messages_in(content, len(content) + 1))
        except WireGarbled:
            with pytest.raises(WireGarbled):
                list(messages_in(content, PIECE))
            return
        assert list(messages_in(content, PIECE)) == at_once
        assert content.startswith(packed(*at_once))
        assert max(map(len, at_once), default=0) <= LARGEST

    fuzz(target, [*conversations(), *corpus("session")], for_s=for_s)


@pytest.mark.parametrize("for_s", DURATIONS)
def test_a_server_hears_each_message_of_a_session_once(for_s: float) -> None:
    def target(content: bytes) -> None:
        links, heard = ServerLinks(INCARNATION, 5, outbox_max=OUTBOX_MAX), Counter[bytes]()
        found: dict[bytes, Accepted[StepResult]] = {}
        key = b""
        try:
            for frame in frames_in(content, STEPS.from_client):
                if isinstance(frame, Hello):
                    accepted = links.accept(frame, lambda hello: 1)
                    if isinstance(accepted, Reject):
                        break
                    key = frame.key
                    found[key] = accepted
                elif key:
                    for plan in found[key].link.receive(frame):
                        heard[key] += 1
                        found[key].link.post(StepResult(plan.step))
                    found[key].link.outgoing()
        except ENDS:
            pass
        assert {name: accepted.link.received for name, accepted in found.items()} == {
            name: heard[name] for name in found
        }

    fuzz(target, [*conversations(), *corpus("session")], for_s=for_s)


@pytest.mark.parametrize("for_s", DURATIONS)
def test_a_client_hears_each_message_of_a_session_once(for_s: float) -> None:
    def target(content: bytes) -> None:
        link: ClientLink[StepPlan] = ClientLink(KEY, "client", outbox_max=OUTBOX_MAX)
        link.connect()
        heard = 0
        try:
            for frame in frames_in(content, STEPS.from_server):
                told = link.receive(frame)
                if isinstance(told, Reject):
                    break
                if isinstance(told, Attached):
                    heard = 0 if told.fresh else heard
                    continue
                heard += len(told)
                link.post(StepPlan(1))
                link.outgoing()
        except ENDS:
            pass
        assert link.heartbeat().ack == heard

    fuzz(target, [*answers(), *corpus("session")], for_s=for_s)


@pytest.mark.parametrize("for_s", DURATIONS)
def test_a_listener_ends_what_it_does_not_understand_and_serves_on(for_s: float) -> None:
    """Each connection has a session of its own, so that what others were refused does not count for it."""
    server = ServerEnd(ServerLinks(INCARNATION, 5))
    keys = itertools.count(1)

    def target(content: bytes) -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
            try:
                connection.sendall(content.replace(KEY, next(keys).to_bytes(len(KEY), "big")))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass
            except ConnectionError:
                pass  # it was cut off
        for link, _ in server.connected:
            server.server.end(link)
        for heard in (server.connected, server.opened, server.bodies):
            heard.clear()

    try:
        introduced = [packed(introduction("steps")) + talk for talk in conversations()]
        fuzz(target, [*introduced, *corpus("session")], for_s=for_s)
        client = ClientEnd(server.port, name="another")
        try:
            client.wait_attached()
            client.post(77)
            wait_for(lambda: 77 in server.steps, "a session that is understood")
        finally:
            client.stop()
    finally:
        server.stop()


# ---- what is edited


def conversations() -> list[bytes]:
    """What a client says on one connection, and on two of one session; what it must not say ends some of them."""
    first = [HELLO, Data(1, 1, 0, StepPlan(1)), Data(1, 2, 1, StepPlan(2)), Heartbeat(1, 2)]
    session = ServerLinks(INCARNATION, 5).accept(HELLO, lambda hello: 1)
    assert isinstance(session, Accepted)
    again = Hello(KEY, 2, session.link.incarnation, 2, 1, "client", PROTOCOL_VERSION)
    talks = (
        first,
        [*first, again, Data(2, 3, 2, StepPlan(3)), Heartbeat(2, 2)],
        [HELLO, Data(1, 1, 0, StepPlan(1)), Data(1, 3, 0, StepPlan(3))],
        [HELLO, Data(1, 1, 0, StepPlan(1)), Heartbeat(1, 9)],
        [*first, replace(again, received=9)],
    )
    return [packed(*map(STEPS.from_client.encode, talk)) for talk in talks]


def answers() -> list[bytes]:
    """What a server says, and what it must not say."""
    talks = (
        [WELCOME, Data(1, 1, 0, StepResult(1)), Data(1, 2, 0, StepResult(2)), Heartbeat(1, 0)],
        [WELCOME, Data(1, 1, 0, StepResult(1)), Data(1, 3, 0, StepResult(3))],
        [WELCOME, Heartbeat(1, 9)],
        [Reject(RejectCode.INVALID, "no")],
    )
    return [packed(*map(STEPS.from_server.encode, talk)) for talk in talks]


def messages_in(content: bytes, piece: int) -> Iterator[bytes]:
    """Raises WireGarbled."""
    splitter = Splitter(LARGEST)
    for place in range(0, len(content), piece):
        splitter.feed(content[place : place + piece])
        yield from map(bytes, splitter.split())


def frames_in(content: bytes, codec: Codec[Any]) -> Iterator[Any]:
    """Raises WireGarbled, MalformedFrame."""
    return map(codec.decode, messages_in(content, PIECE))
