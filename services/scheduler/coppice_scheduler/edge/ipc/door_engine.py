"""The planner as a front door sees it: an `Engine` over the socket to the planner's process.

    generate, finish, abort --collected for a turn of the loop, or a moment of a long one--> Asks --> planner
    Turn --> Streams --> generate's reader, abort's answer

When the socket ends, the planner is gone: every stream ends with an error, and the front door with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from coppice.edge.codec import MalformedFrame
from coppice.edge.wire import Splitter, WireGarbled, framed
from coppice_scheduler.core.state.request import Finish, Output, OutputError, OutputErrorCode, Request, SchedulerStats
from coppice_scheduler.edge.base.engine import EngineLost, ModelInfo
from coppice_scheduler.edge.base.idempotency import Claim, Claimed, FirstOutcome, Settled
from coppice_scheduler.edge.ipc.door_messages import (
    DOOR_SHIFT,
    FROM_DOOR,
    MESSAGE_BYTES_MAX,
    TO_DOOR,
    Abort,
    Asks,
    Beat,
    Cancel,
    FromDoor,
    PlannerState,
    Stop,
    Tenants,
    ToDoor,
    Turn,
)
from coppice_scheduler.edge.text.streams import Streams

_log = logging.getLogger("coppice.scheduler")
BEAT_S = 1.0
COLLECT_S = 0.001  # many requests that come at once need not wait for the last of them to be read


class DoorEngine(asyncio.Protocol):
    """Implements `Engine`; the protocol of the connection to the planner."""

    def __init__(self, door: int, model: ModelInfo) -> None:
        self._model = model
        self._streams = Streams(door << DOOR_SHIFT)
        self._incoming = Splitter(MESSAGE_BYTES_MAX)
        self._transport: asyncio.WriteTransport | None = None
        self._standing = PlannerState(False, False, _NO_STATS)
        self._requests: list[Request] = []  # not sent yet, nor the cancels and aborts
        self._cancels: list[Cancel] = []
        self._aborts: list[Abort] = []
        self._num_aborts = 0  # so far
        self._abort_answers: dict[int, asyncio.Future[int]] = {}  # by number of the question
        self._num_claims = 0  # so far
        self._claim_answers: dict[int, asyncio.Future[Claimed]] = {}  # by number of the claim
        self._collecting_since_s = 0.0
        self._lost: OutputError | None = None
        self.changed = asyncio.Event()  # readiness, or one of the two below
        self.tenants_changed: Callable[[bytes], None] = lambda content: None
        self.stop_wanted = False
        self.planner_is_lost = False

    # ---- Engine ----

    @property
    def ready(self) -> bool:
        return self._standing.ready and self._lost is None

    @property
    def accepts(self) -> bool:
        return self._standing.accepts and self._lost is None

    @property
    def model(self) -> ModelInfo:
        return self._model

    def stats(self) -> SchedulerStats:
        return self._standing.stats

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        stream = self._streams.open(request)
        if self._lost is not None:
            self._streams.end_all(self._lost)
        self._requests.append(stream.request)
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
        self._cancel(request_id, Finish.STOP)

    def end(self, request_id: str, error: OutputError) -> None:
        if self._streams.end(request_id, error):
            self._cancel(request_id, Finish.CANCELLED)

    async def abort(self, tenant: str, names: tuple[str, ...]) -> int:
        if self._lost is not None:
            raise EngineLost(self._lost)
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
        self._num_claims += 1
        number = self._num_claims
        answer: asyncio.Future[Claimed] = asyncio.get_running_loop().create_future()
        self._claim_answers[number] = answer
        self.send(Claim(number, tenant, key, call, is_strict))
        try:
            return await answer
        finally:
            del self._claim_answers[number]

    def settle(self, number: int, outcome: FirstOutcome | None) -> None:
        self.send(Settled(number, outcome))

    @property
    def tenants_refused(self) -> bool:
        return self._standing.tenants_refused

    # ---- the connection ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._beat()

    def data_received(self, data: bytes) -> None:
        try:
            self._incoming.feed(data)
            for message in self._incoming.split():
                self._take(TO_DOOR.decode(message))
        except (MalformedFrame, WireGarbled) as error:
            _log.error("the planner sent what is no message: %s", error)
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.planner_is_lost = True
        self.end_streams("the scheduler failed while it served this request; send it again")

    def send(self, message: FromDoor) -> None:
        if self._transport is not None:
            for piece in framed(FROM_DOOR.encode(message)):
                self._transport.write(piece)

    def end_streams(self, why: str) -> None:
        """End all streams with an error, now and from now on."""
        self._lost = OutputError(OutputErrorCode.SCHEDULER_LOST, why, retry_after_ms=1000)
        self._streams.end_all(self._lost)
        waiting: list[asyncio.Future[Any]] = [*self._abort_answers.values(), *self._claim_answers.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(EngineLost(self._lost))
        self.changed.set()

    def _take(self, message: ToDoor) -> None:
        if isinstance(message, Turn):
            for refusal in message.refusals:
                self._streams.refuse(refusal.request_id, refusal.refused)
            self._streams.take(message.tokens, message.outputs)
            for aborted in message.aborted:
                answer = self._abort_answers.get(aborted.number)
                if answer is not None and not answer.done():
                    answer.set_result(aborted.num_requests)
        elif isinstance(message, PlannerState):
            if message.ready != self._standing.ready:
                self.changed.set()
            self._standing = message
        elif isinstance(message, Claimed):
            claimed = self._claim_answers.get(message.number)
            if claimed is not None and not claimed.done():
                claimed.set_result(message)
        elif isinstance(message, Tenants):
            self.tenants_changed(message.content)
        elif isinstance(message, Stop):
            self.stop_wanted = True
            self.changed.set()
        else:
            raise MalformedFrame(f"a {type(message).__name__} is not for a front door that runs")

    def _beat(self) -> None:
        if self._transport is not None:
            self.send(Beat())
            asyncio.get_running_loop().call_later(BEAT_S, self._beat)

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
        if self._requests or self._cancels or self._aborts:
            self.send(Asks(tuple(self._requests), tuple(self._cancels), tuple(self._aborts)))
            self._requests.clear()
            self._cancels.clear()
            self._aborts.clear()


_NO_STATS = SchedulerStats(0, 0, 0, 0, {}, 0, 0, 0, 0, 0, 0, 0, 0, 0)
