"""A frame that nobody understands ends its session with a reason. It does not come again, and all else goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from coppice.edge import codec
from coppice.ids import CacheEpoch
from coppice.messages.index import Wake
from coppice.messages.step import StepPlan
from coppice.session.frames import Data, Hello, Reject, RejectCode, Welcome
from coppice.session.link import ServerLinks
from tests.fakes import link_ends
from tests.fakes.link_ends import ClientEnd, RawStream, ServerEnd
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
HELLO = Hello(key=b"r" * 16, connection=1, incarnation=0, received=0, epoch=0, name="raw")


def test_the_server_says_why_it_ends_the_session(keep: Keep) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1)))
    other = keep(ClientEnd(server.port))
    other.wait_attached()
    stream = keep(RawStream(server.port))
    stream.write(HELLO)
    assert isinstance(stream.read(), Welcome)
    stream.write(Data(1, 1, 0, StepPlan(1, rows=b"123")))
    farewell = stream.read()
    assert isinstance(farewell, Reject)
    assert farewell.code is RejectCode.INVALID
    assert "StepPlan.rows has 3 bytes" in farewell.message
    stream.wait_end()
    assert not server.bodies
    other.post(7)
    wait_for(lambda: server.steps == [7], "the other session goes on")


def test_a_client_that_was_refused_so_starts_afresh(keep: Keep) -> None:
    server = keep(ServerEnd(ServerLinks(1, 1)))
    client = keep(ClientEnd(server.port))
    client.wait_attached()
    client.link.post(StepPlan(1, rows=b"123"), client.attachment)
    client.wait_attached(2)
    assert client.attached[1].fresh
    client.post(8)
    wait_for(lambda: server.steps == [8], "the next session")
    assert [reject.code for reject in client.rejected] == [RejectCode.INVALID]


def test_a_client_gives_up_the_session_in_which_it_heard_nonsense(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    nonsense = codec.Edge("steps", codec.STEPS.from_client, codec.INDEX.from_server)
    with monkeypatch.context() as patched:
        patched.setattr(link_ends.codec, "STEPS", nonsense)
        server = keep(ServerEnd(ServerLinks(1, 1)))
    client = keep(ClientEnd(server.port))
    client.wait_attached()
    server.server.post(server.newest(), Wake(CacheEpoch(1), ()))
    client.wait_attached(2)
    assert client.attached[1].fresh, "resumed, it would hear the same again"
    assert "no message that is understood here" in client.lost[0]
    client.post(9)
    wait_for(lambda: server.steps == [9], "the next session")
