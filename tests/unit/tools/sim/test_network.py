"""The simulated network fails as real ones do, and a session over it still delivers once and in order."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from coppice.session.frames import Hello, Reject
from coppice.session.link import Attached, ClientLink, ServerLink, ServerLinks
from coppice_sim.base.links import ClientEnd, ServerEnd
from coppice_sim.base.network import Network, Weather
from coppice_sim.base.process import Process
from coppice_sim.base.timeline import MS, Timeline


class Pair:
    """A client that says 1, 2, 3 ... to a server that answers each with its negative."""

    def __init__(self, seed: int, weather: Weather) -> None:
        self.timeline = Timeline()
        rng = Random(seed)
        self.network = Network(self.timeline, rng)
        self.network.weather = weather
        self.client_process = Process("client", self.timeline, rng)
        self.server = ServerEnd(Process("server", self.timeline, rng), self)
        self.network.listen("server", self.server)
        self.server.replace(ServerLinks(1, 1))
        self.heard: list[int] = []
        self.answers: list[int] = []
        self.times_attached = 0
        link: ClientLink[Any] = ClientLink(bytes(16), "client")
        self.client = ClientEnd(self.client_process, self.network, link, "server", self)

    def session_opening(self, hello: Hello) -> int:
        return 1

    def session_connected(self, link: ServerLink[Any], is_new: bool) -> None: ...

    def session_heard(self, link: ServerLink[Any]) -> None: ...

    def session_body(self, link: ServerLink[Any], body: Any) -> None:
        self.heard.append(body)
        self.server.post(link, -body)

    def link_attached(self, attached: Attached) -> None:
        self.times_attached += 1
        if attached.fresh:
            for number in range(1, 31):
                self.client_process.after(number * 20 * MS, lambda number=number: self.client.post(number))  # type: ignore[misc]

    def link_body(self, body: Any) -> None:
        self.answers.append(body)

    def link_lost(self) -> None: ...

    def link_rejected(self, reject: Reject) -> None: ...

    def run(self, virtual_ms: int) -> None:
        end_ns = self.timeline.now_ns + virtual_ms * MS
        while self.timeline.now_ns < end_ns:
            self.timeline.step()


WEATHERS = {
    "calm": Weather(),
    "loss": Weather(loss=0.2),
    "double": Weather(duplication=0.5),
    "late": Weather(delay_ms=8.0, spike=0.1, reset=0.05),
    "all": Weather(loss=0.1, duplication=0.3, delay_ms=4.0, spike=0.05, reset=0.05),
}


@pytest.mark.parametrize("name", WEATHERS)
@pytest.mark.parametrize("seed", range(3))
def test_bodies_arrive_once_and_in_order(name: str, seed: int) -> None:
    pair = Pair(seed, WEATHERS[name])
    pair.run(3_000)
    pair.network.weather = Weather()
    pair.run(4_000)
    assert pair.heard == list(range(1, 31))
    assert pair.answers == [-number for number in range(1, 31)]


def test_the_network_does_all_that_it_is_asked_for() -> None:
    pair = Pair(1, WEATHERS["all"])
    pair.run(3_000)
    assert pair.network.num_lost > 0
    assert pair.network.num_doubled > 0
    assert pair.network.num_late > 0
    assert pair.times_attached > 1


def test_a_partitioned_process_is_reached_by_nobody() -> None:
    pair = Pair(1, Weather(partitioned=frozenset({"server"})))
    pair.run(2_000)
    assert pair.times_attached == 0
    pair.network.weather = Weather()
    pair.run(2_000)
    assert pair.times_attached == 1


def test_a_paused_process_does_everything_later_and_a_dead_one_nothing() -> None:
    timeline = Timeline()
    process = Process("p", timeline, Random(1))
    done: list[str] = []
    process.after(1 * MS, lambda: done.append("first"))
    process.after(2 * MS, lambda: done.append("second"))
    process.pause()
    timeline.step()
    timeline.step()
    assert done == []
    process.go_on()
    assert done == ["first", "second"]
    process.after(1 * MS, lambda: done.append("third"))
    process.die()
    timeline.step()
    assert done == ["first", "second"]


def test_a_client_is_told_that_nobody_listens_and_now_and_then_where_somebody_does() -> None:
    for partitioned, is_dead, told in (("server", False, "some"), ("client", False, "none"), ("", True, "all")):
        pair = Pair(3, Weather(partitioned=frozenset({partitioned} - {""})))
        if is_dead:
            pair.server.process.die()
        answers = [pair.network.refuses(pair.client_process, "server") for _ in range(100)]
        assert {"all": all(answers), "none": not any(answers), "some": 0 < sum(answers) < 50}[told]
