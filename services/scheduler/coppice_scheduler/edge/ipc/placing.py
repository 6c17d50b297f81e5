"""Which planner each stream of a front door is at, and how it gets there.

    alone, or its relatives are somewhere    --> at once
    several planners are ready               --Lookup--> (some planner asks the cache service) --LookedUp--> chosen
    its planner was lost, or has no worker   --> to the one with the least ahead of it; if none is there it waits

Forks and steps of a call go where the first of the call is: they share its blocks.

A prompt has a home among the planners, by its first tokens. That one is asked, since what it has published reaches the
cache service before the question. And where nobody has more cached than it, half of the rest counts as cached there, so
that of equal ones it is chosen, by each front door, for whatever comes with the same beginning later. What this front
door has sent to a planner counts as cached there before it is (`Underway`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain

from coppice.ids import TOKEN_BYTES
from coppice_scheduler.core.policy.placement import choose
from coppice_scheduler.core.state.request import LookedUp, Lookup, Request
from coppice_scheduler.edge.ipc.planner_port import PlannerPort
from coppice_scheduler.edge.ipc.underway import beginning
from coppice_scheduler.edge.text.streams import Stream

LOOKUPS_MAX = 32  # of one tenant at once; more of its requests are placed without, as a flood of refused ones may be
LOOKUP_S = 0.5  # then a request is placed without an answer


@dataclass(slots=True, eq=False)
class _Question:
    asked: PlannerPort
    timer: asyncio.TimerHandle
    family: list[Stream]  # the one that is asked about, and relatives that came meanwhile, in order


@dataclass(slots=True)
class Placing:
    ports: Sequence[PlannerPort]  # of now; those of other schedulers come and go
    _at: dict[str, PlannerPort] = field(default_factory=dict)  # by request id
    _questions: dict[int, _Question] = field(default_factory=dict)  # by number of the first of the family
    _num_asking: Counter[str] = field(default_factory=Counter)  # of these, by tenant
    _families: dict[str, _Question] = field(default_factory=dict)  # the same, by request id of the first
    _waiting: dict[str, Stream] = field(default_factory=dict)  # for any planner, by request id, in order

    def find(self, request_id: str) -> PlannerPort | None:
        """Where it was asked for; None: nowhere yet."""
        return self._at.get(request_id)

    def at(self, port: PlannerPort) -> list[str]:
        return [request_id for request_id, place in self._at.items() if place is port]

    @property
    def num_away(self) -> int:
        """Streams at planners of other schedulers."""
        return sum(port.is_peer for port in self._at.values())

    def unasked(self) -> list[Stream]:
        """Those that no planner knows."""
        asked_about = (question.family for question in self._questions.values())
        return [*chain.from_iterable(asked_about), *self._waiting.values()]

    def enter(self, stream: Stream) -> None:
        """Bring it to a planner."""
        relative = _relative(stream.request)
        there = [port for port in self.ports if port.is_there]
        if relative is not None and relative in self._families:
            self._families[relative].family.append(stream)
        elif len(there) == 1:
            self._give(stream, there[0], 0)
        elif (asked := self._to_ask(stream.request, there)) is None:
            self._go_on(stream, there)
        else:
            self._look_up(stream, asked)

    def close(self, stream: Stream) -> PlannerPort | None:
        """Nobody reads it any more. Returns where it was."""
        request_id = stream.request.request_id
        self._waiting.pop(request_id, None)
        port = self._at.pop(request_id, None)
        if port is not None:
            port.ended(request_id)
        return port  # of a question it is left out when the answer comes

    def take(self, stream: Stream, port: PlannerPort) -> None:
        """Away from a planner that is there."""
        request_id = stream.request.request_id
        del self._at[request_id]
        port.leave(request_id)

    def refused(self, stream: Stream) -> bool:
        """Where it is it was refused, and one of our own planners is there to decide: whether it is asked."""
        own = [port for port in self.ports if port.is_there and not port.is_peer]
        if not own:
            return False
        self._at.pop(stream.request.request_id).ended(stream.request.request_id)
        self._go_on(stream, own)
        return True

    def came(self, port: PlannerPort) -> None:
        """It has what waited for any planner."""
        waiting, self._waiting = self._waiting, {}
        for stream in waiting.values():
            if not stream.has_ended:
                self._give(stream, port, 0)

    def lost(self, port: PlannerPort, streams: Sequence[Stream]) -> None:
        """`streams`: those that were there and go on, in order."""
        for request_id in self.at(port):
            del self._at[request_id]
        self._end_questions(port)
        self.move(streams)

    def move(self, streams: Sequence[Stream]) -> None:
        """To whom there is; relatives stay together."""
        there = [port for port in self.ports if port.is_there]
        for stream in streams:
            self._go_on(stream, there)

    def _go_on(self, stream: Stream, there: list[PlannerPort]) -> None:
        place = self._place_of_relative(stream.request)
        if place is not None and place in there:
            self._give(stream, place, 0)
        elif there:
            self._choose([stream], there, LookedUp(stream.request.number))
        else:
            self._waiting[stream.request.request_id] = stream

    def _end_questions(self, port: PlannerPort) -> None:
        """It will answer none any more."""
        for number, question in list(self._questions.items()):
            if question.asked is port:
                self.looked_up(LookedUp(number))

    def looked_up(self, found: LookedUp) -> None:
        """The answer, or that there is none."""
        question = self._questions.pop(found.number, None)
        if question is None:
            return
        question.timer.cancel()
        first = question.family[0].request
        del self._families[first.request_id]
        self._num_asking[first.tenant] -= 1
        if not self._num_asking[first.tenant]:
            del self._num_asking[first.tenant]
        family = [stream for stream in question.family if not (stream.has_ended or stream.is_closed)]
        there = [port for port in self.ports if port.is_there]
        if there and family:
            self._choose(family, there, found)
        else:
            self._waiting.update((stream.request.request_id, stream) for stream in family)

    def _to_ask(self, request: Request, there: Sequence[PlannerPort]) -> PlannerPort | None:
        """None: where it goes is clear without, or enough is asked for its tenant."""
        if request.num_places or self._num_asking[request.tenant] >= LOOKUPS_MAX:
            return None
        if self._place_of_relative(request) in there:
            return None
        ready = [port for port in there if port.load.is_ready]
        return ready[_home(request, ready)] if len(ready) > 1 else None

    def _place_of_relative(self, request: Request) -> PlannerPort | None:
        relative = _relative(request)
        return None if relative is None else self._at.get(relative)

    def _look_up(self, stream: Stream, port: PlannerPort) -> None:
        request = stream.request
        timer = asyncio.get_running_loop().call_later(LOOKUP_S, self.looked_up, LookedUp(request.number))
        question = _Question(port, timer, [stream])
        self._num_asking[request.tenant] += 1
        self._questions[request.number] = self._families[request.request_id] = question
        port.look_up(Lookup(request.number, request.domain, request.tokens, request.salt))

    def _choose(self, family: list[Stream], there: list[PlannerPort], found: LookedUp) -> None:
        request = family[0].request
        num_tokens = len(request.tokens) // TOKEN_BYTES
        left = [max(num_tokens - port.matched(request, found), 0) for port in there]
        expected = [num_tokens - count for count in left]
        home = _home(request, there)
        if left[home] == min(left):
            expected[home] += left[home] // 2
        index = choose([port.load for port in there], expected, num_tokens)
        self._give(family[0], there[index], left[index])
        for relative in family[1:]:
            self._give(relative, there[index], 0)

    def _give(self, stream: Stream, port: PlannerPort, num_tokens: int) -> None:
        self._at[stream.request.request_id] = port
        port.ask(stream, num_tokens)


def _relative(request: Request) -> str | None:
    """A step has its call at the same planner whatever becomes of the request that it forks."""
    return request.step_of or request.fork_of


def _home(request: Request, ports: Sequence[PlannerPort]) -> int:
    """The same at every front door, and for all others when one of them goes or comes: rendezvous hashing."""
    begin = beginning(request)
    return max(range(len(ports)), key=lambda index: blake2b(begin, digest_size=8, key=ports[index].key).digest())
