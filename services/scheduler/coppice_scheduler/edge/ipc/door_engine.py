"""The planners as a front door sees them: an `Engine` over a socket to each planner of now.

    generate, finish, abort --> Placing --> the port of one planner, or of all
    Turn of a planner --> Streams --> generate's reader, abort's answer

When a planner is lost, its streams are brought to another that is there, or wait for the next. That one is asked for
what is left of each: behind the tokens that are here, with the same seed and the same positions. What the lost one had
computed beyond that nobody has seen. Planners of other schedulers (`ipc/peers`) are as good as those of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass

from coppice.addresses import Address
from coppice.tls.credentials import Credentials
from coppice_scheduler.core.state.request import (
    Finish,
    Output,
    OutputError,
    OutputErrorCode,
    RefusedReason,
    Request,
    SchedulerStats,
)
from coppice_scheduler.edge.base.engine import EngineLost, ModelInfo
from coppice_scheduler.edge.base.idempotency import Claimed, FirstOutcome
from coppice_scheduler.edge.ipc.door_messages import ABORTED, DOOR_SHIFT, Abort, Cancel, Turn
from coppice_scheduler.edge.ipc.links import ParentLink
from coppice_scheduler.edge.ipc.peers.peers import Peers, reaching
from coppice_scheduler.edge.ipc.peers.port import ALREADY_REACHED, OF_OUR_OWN, PeerPort
from coppice_scheduler.edge.ipc.placing import Placing
from coppice_scheduler.edge.ipc.planner_port import PlannerPort, Reach
from coppice_scheduler.edge.ipc.stats import of_all
from coppice_scheduler.edge.text.streams import Stream, Streams

MOVES_MAX = 3  # of one request, from planner to planner
STRANDED_S = 0.25  # that a planner may be without a worker before its requests go elsewhere


@dataclass(slots=True, eq=False)
class _AbortQuestion:
    """Asked of all planners that are there."""

    open: set[PlannerPort]
    answer: asyncio.Future[int]
    num_requests: int = 0  # that ended, by the answers so far


class DoorEngine:
    """Implements `Engine`. Made in the loop; `keep_planners` runs beside everything else."""

    def __init__(
        self, door: int, model: ModelInfo, reaches: Sequence[Reach], parent: ParentLink, content: bytes = b""
    ) -> None:
        """`reaches`: one for each planner of this scheduler. `content`: the tenants file that the front door has."""
        self._door = door
        self._model = model
        self._parent = parent
        self._content = content
        self._streams = Streams(door << DOOR_SHIFT)
        self._own = tuple(PlannerPort(door, place, reach, self) for place, reach in enumerate(reaches))
        self._ports = list(self._own)  # and those of planners of other schedulers that are there
        self._placing = Placing(self._ports)
        parent.num_away = lambda: self._placing.num_away
        self._num_aborts = 0  # so far
        self._aborts: dict[int, _AbortQuestion] = {}  # by number of the question
        self._lost: OutputError | None = None  # for good
        self.changed = parent.changed  # readiness, too
        self.tenants_changed: Callable[[bytes], None] = lambda content: None
        self.moved: Callable[[Request], None] = lambda request: None

    # ---- Engine ----

    @property
    def ready(self) -> bool:
        return self._is_open and any(port.state.ready for port in self._ports)

    @property
    def accepts(self) -> bool:
        return self._is_open and any(port.accepts for port in self._ports)

    @property
    def _is_open(self) -> bool:
        """While this scheduler shuts down, others would serve; its front doors end all the same."""
        return self._lost is None and not any(port.state.is_draining for port in self._own)

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def tenants_refused(self) -> bool:
        return any(port.state.tenants_refused for port in self._own)

    def stats(self) -> SchedulerStats:
        return of_all([port.state.stats for port in self._own])

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        stream = self._streams.open(request)
        if self._lost is not None:
            self._streams.end_all(self._lost)
        else:
            self._placing.enter(stream)
        try:
            finished = False
            while not finished:
                output = await stream.read()
                finished = output.finish is not None
                yield output
        finally:
            self._streams.close(stream)
            port = self._placing.close(stream)
            if port is not None and not stream.has_ended:
                port.cancel(Cancel(request.request_id, Finish.CANCELLED))

    def finish(self, request_id: str) -> None:
        stream = self._streams.find(request_id)
        if stream is None or stream.has_ended:
            return
        stream.stop_wanted = True
        port = self._placing.find(request_id)
        if port is not None and port.is_there:
            port.cancel(Cancel(request_id, Finish.STOP))
        else:
            stream.stop()

    def end(self, request_id: str, error: OutputError) -> None:
        if self._streams.end(request_id, error):
            port = self._placing.find(request_id)
            if port is not None:
                port.cancel(Cancel(request_id, Finish.CANCELLED))

    async def abort(self, tenant: str, names: tuple[str, ...]) -> int:
        if self._lost is not None:
            raise EngineLost(self._lost)
        there = {port for port in self._ports if port.is_there}
        if not there:
            raise EngineLost(_ABORT_UNHEARD)
        num_here = self._abort_unasked(tenant, names)
        self._num_aborts += 1
        question = _AbortQuestion(there, asyncio.get_running_loop().create_future(), num_here)
        self._aborts[self._num_aborts] = question
        number = self._num_aborts
        for port in there:
            port.abort(Abort(number, tenant, names))
        try:
            return await question.answer
        finally:
            del self._aborts[number]

    def _abort_unasked(self, tenant: str, names: tuple[str, ...]) -> int:
        """Of those that are here and that no planner has heard of; their number."""
        num_ended = 0
        for stream in self._placing.unasked():
            request = stream.request
            if request.tenant == tenant and not set(names).isdisjoint(request.names):
                num_ended += self._streams.end(request.request_id, ABORTED)
        return num_ended

    async def claim(self, tenant: str, key: bytes, call: bytes, *, is_strict: bool) -> Claimed:
        if self._lost is not None:
            raise EngineLost(self._lost)
        return await self._parent.claim(tenant, key, call, is_strict=is_strict)

    def settle(self, number: int, outcome: FirstOutcome | None) -> None:
        self._parent.settle(number, outcome)

    # ---- the planners ----

    async def keep_planners(self) -> None:
        """Have each planner of this scheduler, one after the other. To be cancelled after `end_streams`."""
        await asyncio.gather(*(port.keep() for port in self._own))

    async def keep_peers(self, names: Sequence[Address], tls: Credentials | None, instance: bytes) -> None:
        """Have the planners of other schedulers at these addresses; `instance` is that of our own scheduler."""

        def why_not(other: bytes) -> str:
            if other.startswith(instance):
                return OF_OUR_OWN
            return ALREADY_REACHED if any(port.is_peer and port.key == other for port in self._ports) else ""

        reach = reaching(tls)
        await Peers(names, lambda address: PeerPort(self._door, address, self._model, reach, self, why_not)).keep()

    def end_streams(self, why: str) -> None:
        """End all streams with an error, now and from now on."""
        self._lost = OutputError(OutputErrorCode.SCHEDULER_LOST, why, retry_after_ms=1000)
        self._streams.end_all(self._lost)
        for question in self._aborts.values():
            _fail(question, self._lost)
        self._parent.end_claims(EngineLost(self._lost))
        self.changed.set()

    # ---- what they say (`Told`) ----

    def came(self, port: PlannerPort) -> None:
        if port.is_peer:
            self._ports.append(port)
        self._placing.came(port)
        port.send()

    def state_changed(self, port: PlannerPort) -> None:
        self.changed.set()
        for one in self._ports:
            if one.is_stranded and any(other.state.ready for other in self._ports):
                asyncio.get_running_loop().call_later(STRANDED_S, self._rescue, one)

    def _rescue(self, port: PlannerPort) -> None:
        """What waits at a planner without a worker goes on at one that has some."""
        if not port.is_stranded or self._lost is not None or not any(other.state.ready for other in self._ports):
            return
        taken = list(self._going_on(port))
        for stream in taken:
            self.moved(stream.request)
            self._placing.take(stream, port)
            self._streams.renumber(stream)
        self._placing.move(taken)

    def tenants(self, port: PlannerPort) -> None:
        """It counts here when all planners of this scheduler that are there know it: no request comes to one of them
        that does not. What a planner of another scheduler refuses for it, they decide."""
        content = port.content
        is_known = all(other.content == content for other in self._own if other.is_there)
        if content is not None and is_known and content != self._content:
            self._content = content
            self.tenants_changed(content)

    def turn(self, port: PlannerPort, turn: Turn) -> None:
        for refusal in turn.refusals:
            if not (port.is_peer and refusal.refused.reason in _NOT_FINAL and self._ask_own(refusal.request_id)):
                self._streams.refuse(refusal.request_id, refusal.refused)
        self._streams.take(turn.tokens, turn.outputs, turn.granted)
        for aborted in turn.aborted:
            question = self._aborts.get(aborted.number)
            if question is not None:
                question.open.discard(port)
                question.num_requests += aborted.num_requests
                if not question.open and not question.answer.done():
                    question.answer.set_result(question.num_requests)
        for found in turn.looked_up:
            self._placing.looked_up(found)

    def _ask_own(self, request_id: str) -> bool:
        """What a planner of another scheduler refuses for reasons of that one, a planner of ours decides, if it is
        there."""
        stream = self._streams.find(request_id)
        if stream is None or stream.has_ended or self._placing.find(request_id) is None:
            return False
        if not stream.was_taken:
            stream.is_asked = False
        return self._placing.refused(stream)

    def lost(self, port: PlannerPort, *, has_heard: bool) -> None:
        if port.is_peer:
            self._ports.remove(port)
        go_on = [s for s in self._going_on(port) if not (s.is_asked and has_heard) or self._may_move(s)]
        self._placing.lost(port, go_on)
        for other in self._own:
            if other.is_there:  # they may all know a tenants file that this one did not
                self.tenants(other)
        for question in self._aborts.values():
            if port in question.open:
                _fail(question, _ABORT_UNHEARD)
        self.changed.set()

    def _going_on(self, port: PlannerPort) -> Iterator[Stream]:
        """Of those that are there, in order. The others end."""
        for request_id in self._placing.at(port):
            stream = self._streams.find(request_id)
            if stream is None or stream.has_ended:
                continue
            if stream.stop_wanted:
                stream.stop()
            else:
                yield stream

    def _may_move(self, stream: Stream) -> bool:
        """To another planner, as its own failed; else it has ended."""
        stream.num_moves += 1
        if stream.num_moves > MOVES_MAX:
            self._streams.end(stream.request.request_id, _LOST_TOO_OFTEN)
            return False
        self.moved(stream.request)
        return True


def _fail(question: _AbortQuestion, error: OutputError) -> None:
    if not question.answer.done():
        question.answer.set_exception(EngineLost(error))


_NOT_FINAL = frozenset({RefusedReason.DRAINING, RefusedReason.TENANT_REMOVED, RefusedReason.INTERNAL})
_ABORT_UNHEARD = OutputError(
    OutputErrorCode.SCHEDULER_LOST, "the scheduler's planner was lost and is started again; send it again", 1000
)
_LOST_TOO_OFTEN = OutputError(
    OutputErrorCode.SCHEDULER_LOST,
    f"the scheduler failed {MOVES_MAX + 1} times while it served this request; send it again",
    1000,
)
