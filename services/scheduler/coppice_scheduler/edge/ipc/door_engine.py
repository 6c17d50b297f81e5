"""The planner as a front door sees it: an `Engine` over the socket to the planner of now.

    generate, finish, abort --collected for a turn of the loop, or a moment of a long one--> Asks --> planner
    Turn --> Streams --> generate's reader, abort's answer

When the planner is lost, all streams wait. The next one is asked for what is left of each: behind the tokens that are
here, with the same seed and the same positions. What the lost one had computed beyond that nobody has seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from coppice_scheduler.core.state.request import Finish, Output, OutputError, OutputErrorCode, Request, SchedulerStats
from coppice_scheduler.edge.base.engine import NO_STATS, OUTAGE_S, EngineLost, ModelInfo
from coppice_scheduler.edge.base.idempotency import Claimed, FirstOutcome
from coppice_scheduler.edge.ipc.door_messages import (
    DOOR_SHIFT,
    Abort,
    Asks,
    Cancel,
    Opened,
    PlannerState,
    PlannerToDoor,
    Tenants,
)
from coppice_scheduler.edge.ipc.links import ParentLink, PlannerLink
from coppice_scheduler.edge.text.streams import Stream, Streams

_log = logging.getLogger("coppice.scheduler")
COLLECT_S = 0.001  # many requests that come at once need not wait for the last of them to be read
MOVES_MAX = 3  # of one request, from planner to planner
REACH_AGAIN_S = 0.02

Reach = Callable[[PlannerLink], Awaitable[object]]  # connect it to the planner of now; raises OSError


class DoorEngine:
    """Implements `Engine`. Made in the loop; `keep_planner` runs beside everything else."""

    def __init__(self, door: int, model: ModelInfo, reach: Reach, parent: ParentLink) -> None:
        self._door = door
        self._model = model
        self._reach = reach
        self._parent = parent
        self._streams = Streams(door << DOOR_SHIFT)
        self._link: PlannerLink | None = None
        self._standing = PlannerState(False, False, NO_STATS)
        self._lost_s: float | None = None  # since when there is no planner; None: there is, or never was
        self._requests: list[Stream] = []  # not asked for yet, nor the cancels and aborts
        self._cancels: list[Cancel] = []
        self._aborts: list[Abort] = []
        self._num_aborts = 0  # so far
        self._abort_answers: dict[int, asyncio.Future[int]] = {}  # by number of the question
        self._collecting_since_s = 0.0
        self._lost: OutputError | None = None  # for good
        self.changed = parent.changed  # readiness, too
        self.tenants_changed: Callable[[bytes], None] = lambda content: None
        self.moved: Callable[[Request], None] = lambda request: None

    # ---- Engine ----

    @property
    def ready(self) -> bool:
        return self._standing.ready and self._lost is None

    @property
    def accepts(self) -> bool:
        if self._lost is not None:
            return False
        if self._lost_s is not None:
            return asyncio.get_running_loop().time() - self._lost_s < OUTAGE_S
        return self._standing.accepts

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def tenants_refused(self) -> bool:
        return self._standing.tenants_refused

    def stats(self) -> SchedulerStats:
        return self._standing.stats

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        stream = self._streams.open(request)
        if self._lost is not None:
            self._streams.end_all(self._lost)
        self._requests.append(stream)
        self._ask_soon()
        try:
            finished = False
            while not finished:
                output = await stream.read()
                finished = output.finish is not None
                yield output
        finally:
            self._streams.close(stream)
            if not stream.has_ended:
                self._cancel(request.request_id, Finish.CANCELLED)

    def finish(self, request_id: str) -> None:
        stream = self._streams.find(request_id)
        if stream is not None and not stream.has_ended:
            stream.stop_wanted = True
            if self._link is None:
                stream.stop()
            else:
                self._cancel(request_id, Finish.STOP)

    def end(self, request_id: str, error: OutputError) -> None:
        if self._streams.end(request_id, error):
            self._cancel(request_id, Finish.CANCELLED)

    async def abort(self, tenant: str, names: tuple[str, ...]) -> int:
        if self._lost is not None:
            raise EngineLost(self._lost)
        if self._link is None:
            raise EngineLost(_ABORT_UNHEARD)
        self._num_aborts += 1
        number = self._num_aborts
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._abort_answers[number] = answer
        self._aborts.append(Abort(number, tenant, names))
        self._ask_soon()
        try:
            return await answer
        finally:
            del self._abort_answers[number]

    async def claim(self, tenant: str, key: bytes, call: bytes, *, is_strict: bool) -> Claimed:
        if self._lost is not None:
            raise EngineLost(self._lost)
        return await self._parent.claim(tenant, key, call, is_strict=is_strict)

    def settle(self, number: int, outcome: FirstOutcome | None) -> None:
        self._parent.settle(number, outcome)

    # ---- the planner ----

    async def keep_planner(self) -> None:
        """Have a planner, one after the other, until `end_streams`."""
        while self._lost is None:
            link = PlannerLink(self._take)
            try:
                await self._reach(link)
            except OSError as error:
                _log.debug("no planner is to be reached: %s", error)
                await asyncio.sleep(REACH_AGAIN_S)
                continue
            self._begin_with(link)
            await link.is_over.wait()
            self._planner_lost(link)

    def end_streams(self, why: str) -> None:
        """End all streams with an error, now and from now on."""
        self._lost = OutputError(OutputErrorCode.SCHEDULER_LOST, why, retry_after_ms=1000)
        self._streams.end_all(self._lost)
        self._end_aborts(self._lost)
        self._parent.end_claims(EngineLost(self._lost))
        self.changed.set()

    def _begin_with(self, link: PlannerLink) -> None:
        """Ask it for everything that is at work here, in the order in which it came."""
        self._link = link
        self._requests = self._streams.at_work()
        link.send(Opened(self._door))
        self._ask()

    def _planner_lost(self, link: PlannerLink) -> None:
        self._link, self._lost_s = None, asyncio.get_running_loop().time()
        self._standing = PlannerState(False, False, self._standing.stats, self._standing.tenants_refused)
        for stream in self._streams.at_work():
            if stream.stop_wanted:
                stream.stop()
            elif stream.is_asked and link.has_heard:
                self._move(stream)
        for questions in (self._requests, self._cancels, self._aborts):
            questions.clear()
        self._end_aborts(_ABORT_UNHEARD)
        self.changed.set()

    def _move(self, stream: Stream) -> None:
        """It goes on at the next planner."""
        stream.num_moves += 1
        if stream.num_moves > MOVES_MAX:
            self._streams.end(stream.request.request_id, _LOST_TOO_OFTEN)
        else:
            self.moved(stream.request)

    def _end_aborts(self, error: OutputError) -> None:
        for answer in self._abort_answers.values():
            if not answer.done():
                answer.set_exception(EngineLost(error))

    def _take(self, message: PlannerToDoor) -> None:
        if isinstance(message, PlannerState):
            if message.ready != self._standing.ready:
                self.changed.set()
            self._standing, self._lost_s = message, None
        elif isinstance(message, Tenants):
            self.tenants_changed(message.content)
        else:
            for refusal in message.refusals:
                self._streams.refuse(refusal.request_id, refusal.refused)
            self._streams.take(message.tokens, message.outputs, message.granted)
            for aborted in message.aborted:
                answer = self._abort_answers.get(aborted.number)
                if answer is not None and not answer.done():
                    answer.set_result(aborted.num_requests)

    # ---- what it is asked ----

    def _cancel(self, request_id: str, finish: Finish) -> None:
        self._cancels.append(Cancel(request_id, finish))
        self._ask_soon()

    def _ask_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if len(self._requests) + len(self._cancels) + len(self._aborts) == 1:
            self._collecting_since_s = loop.time()
            loop.call_soon(self._ask)
        elif loop.time() - self._collecting_since_s > COLLECT_S:
            self._ask()

    def _ask(self) -> None:
        """What is at work is asked for when there is a planner; without one there is nothing to cancel."""
        if self._link is not None and (self._requests or self._cancels or self._aborts):
            requests = tuple(stream.to_ask for stream in self._requests)
            for stream in self._requests:
                stream.is_asked = True
            self._link.send(Asks(requests, tuple(self._cancels), tuple(self._aborts)))
        for questions in (self._requests, self._cancels, self._aborts):
            questions.clear()


_ABORT_UNHEARD = OutputError(
    OutputErrorCode.SCHEDULER_LOST, "the scheduler's planner was lost and is started again; send it again", 1000
)
_LOST_TOO_OFTEN = OutputError(
    OutputErrorCode.SCHEDULER_LOST,
    f"the scheduler failed {MOVES_MAX + 1} times while it served this request; send it again",
    1000,
)
