"""Ends of a session whose builds differ by one version of the protocol, over real connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from coppice.edge.codec import STEPS, Codec, Edge
from coppice.messages.record import Message
from coppice.messages.step import StepPlan, StepResult
from coppice.session.frames import Data, Heartbeat, Hello, Reject, RejectCode, Welcome
from coppice.session.link import ServerLinks
from coppice.session.versions import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Versions
from tests.fakes.link_ends import ClientEnd, RawStream, ServerEnd
from tests.fakes.messages.golden import older
from tests.fakes.waiting import wait_for

Keep = Callable[[Any], Any]
OLDER = older(STEPS, PROTOCOL_VERSION_MIN)


class Younger(Message, frozen=True):
    SINCE: ClassVar[int] = PROTOCOL_VERSION
    step: int


NEWEST = replace(
    STEPS,
    from_client=Codec(Hello | Data[StepPlan | Younger] | Heartbeat),
    from_server=Codec(Welcome | Reject | Data[StepResult | Younger] | Heartbeat),
)


@pytest.mark.parametrize("listening", ["older", "newest"])
def test_what_only_the_newer_end_knows_is_not_said_to_the_older_one(keep: Keep, listening: str) -> None:
    edges = (OLDER, NEWEST) if listening == "older" else (NEWEST, OLDER)
    server, client = ends(keep, *edges)
    assert client.attached[0].version == server.newest().version == PROTOCOL_VERSION_MIN
    client.link.post(Younger(1), client.attachment)
    assert server.server.post(server.newest(), Younger(1))
    client.post(2)
    server.post(2)
    wait_for(lambda: server.steps and client.steps, "what both know")
    assert server.steps == client.steps == [2]
    assert len(client.attached) == 1


def test_ends_of_the_newest_version_say_all_of_it(keep: Keep) -> None:
    server, client = ends(keep, NEWEST, NEWEST)
    client.link.post(Younger(1), client.attachment)
    assert server.server.post(server.newest(), Younger(1))
    wait_for(lambda: server.steps and client.steps, "the newer message")
    assert server.steps == client.steps == [1]


def ends(keep: Keep, listening: Edge, connecting: Edge) -> tuple[ServerEnd, ClientEnd]:
    server = keep(ServerEnd(ServerLinks(1, 5), edge=listening))
    client = keep(ClientEnd(server.where, edge=connecting))
    client.wait_attached()
    return server, client


def test_a_peer_beyond_the_range_is_refused_and_both_ends_say_so(keep: Keep, caplog: pytest.LogCaptureFixture) -> None:
    server = keep(ServerEnd(ServerLinks(1, 5)))
    client = keep(ClientEnd(server.where, edge=replace(STEPS, speaks=Versions(1, 2)), name="old"))
    wait_for(lambda: client.rejected, "the refusal")
    (refused,) = client.rejected
    assert refused.code is RejectCode.VERSION
    assert "'old' speaks session protocol 1 to 2" in refused.message
    assert f"upgrade 'old' to a build that speaks {PROTOCOL_VERSION_MIN}" in refused.message
    raw = keep(RawStream(server.where))
    raw.write(Hello(b"r" * 16, 1, 0, 0, 0, "older", 1))
    assert "'older' speaks session protocol 1," in raw.read().message
    told = [record.getMessage() for record in caplog.records if "session protocol" in record.getMessage()]
    assert told.count(f"a session was refused: {refused.message}") == 1, "once, not at each attempt"
    assert len(told) == 2
    assert not server.opened, "the application was asked for a session that cannot be"
