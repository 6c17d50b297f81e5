"""Sessions over connections that lose, cut and delay: exactly once, in order, fresh only when the server forgot."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)
from msgspec.structs import replace

from coppice.session import link as link_module
from coppice.session.frames import Data, Heartbeat, Hello, Reject, RejectCode
from coppice.session.link import Attached, ClientLink, LinkBroken, LinkOverflow, ServerLink, ServerLinks
from coppice.session.versions import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, Versions
from tests.fakes.cache.session_machine import KEY, SessionMachine

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
    return int(links._upper) | 1


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


@pytest.mark.parametrize(
    ("client", "server", "spoken"),
    [
        (Versions(6, 7), Versions(6, 7), 7),
        (Versions(6, 7), Versions(7, 8), 7),
        (Versions(7, 8), Versions(6, 7), 7),
        (Versions(6, 6), Versions(6, 7), 6),
        (Versions(6, 7), Versions(6, 6), 6),
        (Versions(7, 7), Versions(6, 8), 7),
    ],
)
def test_the_highest_common_version_is_spoken(client: Versions, server: Versions, spoken: int) -> None:
    link: ClientLink[str] = ClientLink(KEY, "client", speaks=client)
    accepted = ServerLinks[str](1, 1).accept(link.connect(), lambda _: 1, server)
    assert not isinstance(accepted, Reject)
    told = link.receive(accepted.welcome)
    assert isinstance(told, Attached)
    assert told.version == link.version == accepted.link.version == accepted.welcome.version == spoken


def test_a_build_from_before_ranges_is_heard_and_hears() -> None:
    """It knows one version, and its Hello does not have the highest."""
    accepted = ServerLinks[str](1, 1).accept(Hello(KEY, 1, 0, 0, 0, "old", PROTOCOL_VERSION_MIN, b""), lambda _: 1)
    assert not isinstance(accepted, Reject)
    assert accepted.welcome.version == PROTOCOL_VERSION_MIN
    assert ClientLink[str](KEY, "new").connect().version == PROTOCOL_VERSION_MIN, (
        "what it compares with its own version"
    )


@pytest.mark.parametrize(
    ("client", "server", "told"),
    [
        (Versions(4, 5), Versions(6, 7), "'c' speaks session protocol 4 to 5, .* 6 to 7: upgrade 'c' to .* speaks 6"),
        (Versions(8, 9), Versions(6, 7), "'c' .* 8 to 9, .* 6 to 7: upgrade the service that it called to .* speaks 8"),
        (Versions(5, 5), Versions(6, 7), "'c' speaks session protocol 5, "),
    ],
)
def test_versions_without_a_common_one_are_refused_and_both_are_named(
    client: Versions, server: Versions, told: str
) -> None:
    asked: list[Hello] = []
    hello = ClientLink[str](KEY, "c", speaks=client).connect()
    refused = ServerLinks[str](1, 1).accept(hello, lambda hello: asked.append(hello) or 1, server)
    assert isinstance(refused, Reject)
    assert refused.code is RejectCode.VERSION
    assert re.search(told, refused.message)
    assert not asked


def test_a_server_that_answers_in_another_version_is_refused() -> None:
    client: ClientLink[str] = ClientLink(KEY, "old")
    accepted = ServerLinks[str](1, 1).accept(client.connect(), lambda _: 1)
    assert not isinstance(accepted, Reject)
    heard = client.receive(replace(accepted.welcome, version=PROTOCOL_VERSION + 1))
    assert isinstance(heard, Reject)
    assert heard.code is RejectCode.VERSION
    assert not client.is_attached


def test_a_hello_of_nonsense_versions_is_of_one_version() -> None:
    hello = Hello(KEY, 1, 0, 0, 0, "c", PROTOCOL_VERSION, b"", 3)
    assert hello.versions == Versions(PROTOCOL_VERSION, PROTOCOL_VERSION)


def test_a_refusal_of_the_application_opens_nothing() -> None:
    links: ServerLinks[str] = ServerLinks(1, 1)
    refusal = Reject(RejectCode.FENCED, "no")
    assert links.accept(ClientLink[str](KEY, "c").connect(), lambda _: refusal) is refusal
    assert len(links) == 0


def test_a_session_is_resumed_under_its_own_name_alone() -> None:
    """Who may have a session is judged by the name in its Hello."""
    links: ServerLinks[str] = ServerLinks(1, 1)
    client: ClientLink[str] = ClientLink(KEY, "a")
    assert not isinstance(links.accept(client.connect(), lambda _: 1), Reject)
    refused = links.accept(replace(client.connect(), name="b"), lambda _: 1)
    assert isinstance(refused, Reject)
    assert refused.code is RejectCode.INVALID
    assert not isinstance(links.accept(client.connect(), lambda _: 1), Reject)


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
    assert heard == Attached(fresh=True, epoch=10, server_epoch=1, version=PROTOCOL_VERSION)
    assert client.outgoing() == []


def test_a_welcome_to_a_session_that_was_given_up_meanwhile_attaches_nothing() -> None:
    client: ClientLink[str] = ClientLink(KEY, "c")
    accepted = ServerLinks[str](7, 3).accept(client.connect(), lambda _: 9)
    assert not isinstance(accepted, Reject)
    client.renew(b"n" * 16)
    assert client.receive(accepted.welcome) == []
    assert not client.is_attached
    attach(client, ServerLinks(8, 4))


def test_the_client_names_its_epoch_after_a_restart() -> None:
    client: ClientLink[str] = ClientLink(KEY, "c")
    attach(client, ServerLinks(1, 1), epoch=77)
    assert client.connect().epoch == 77


def test_a_server_knows_the_incarnations_that_it_gave_out() -> None:
    mine, before = ServerLinks[str]((7 << 32) | 5, 7), ServerLinks[str]((7 << 32) | 6, 7)
    given = []
    for number in range(3):
        links = attach(ClientLink(bytes([number]) * 16, "c"), mine)
        given.append(links.incarnation)
        mine.forget(links)
    assert len(set(given)) == 3
    assert all(mine.issued(incarnation) for incarnation in given)
    assert {incarnation >> 32 for incarnation in given} == {7}
    others = [0, given[0] - 1, given[2] + 1, given[0] + (1 << 32), attach(ClientLink(KEY, "c"), before).incarnation]
    assert not any(mine.issued(incarnation) for incarnation in others)
