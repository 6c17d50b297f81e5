"""A front door's connections: to its parent, which outlives planners, and to each planner of now."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from coppice.edge.codec import Codec, MalformedFrame
from coppice.edge.wire import Splitter, WireGarbled, framed
from coppice_scheduler.edge.base.idempotency import Claim, Claimed, FirstOutcome, Settled
from coppice_scheduler.edge.ipc.door_messages import (
    DOOR_TO_PARENT,
    DOOR_TO_PLANNER,
    MESSAGE_BYTES_MAX,
    PARENT_TO_DOOR,
    PLANNER_TO_DOOR,
    Beat,
    ParentToDoor,
    PlannerToDoor,
    Stop,
)

_log = logging.getLogger("coppice.scheduler")
BEAT_S = 1.0


class _Link(asyncio.Protocol, ABC):
    """Messages over one connection. It is cut when what comes is none."""

    def __init__(self, says: Codec[Any], hears: Codec[Any], peer: str) -> None:
        self._encode = says.encode
        self._decode = hears.decode
        self._peer = peer
        self._incoming = Splitter(MESSAGE_BYTES_MAX)
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._incoming.feed(data)
            for message in self._incoming.split():
                self.take(self._decode(message))
        except (MalformedFrame, WireGarbled) as error:
            _log.error("%s sent what is no message: %s", self._peer, error)
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.lost()

    def send(self, message: Any) -> None:
        """Dropped when the connection is over."""
        if self._transport is not None:
            for piece in framed(self._encode(message)):
                self._transport.write(piece)

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @abstractmethod
    def take(self, message: Any) -> None: ...

    @abstractmethod
    def lost(self) -> None: ...


class PlannerLink(_Link):
    """To one planner, as long as it lives."""

    def __init__(self, take: Callable[[PlannerToDoor], None], peer: str = "the planner") -> None:
        super().__init__(DOOR_TO_PLANNER, PLANNER_TO_DOOR, peer)
        self._take = take
        self.has_heard = False
        self.is_over = asyncio.Event()

    def take(self, message: PlannerToDoor) -> None:
        self.has_heard = True
        self._take(message)

    def lost(self) -> None:
        self.is_over.set()


class ParentLink(_Link):
    """To the process that started this front door: when to end, and calls with an `Idempotency-Key`."""

    def __init__(self) -> None:
        super().__init__(DOOR_TO_PARENT, PARENT_TO_DOOR, "the scheduler's process")
        self._num_claims = 0  # so far
        self._claim_answers: dict[int, asyncio.Future[Claimed]] = {}  # by number of the claim
        self.num_away: Callable[[], int] = lambda: 0  # requests at planners of other schedulers
        self.changed = asyncio.Event()  # one of the two below
        self.stop_wanted = False
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._beat()

    async def claim(self, tenant: str, key: bytes, call: bytes, *, is_strict: bool) -> Claimed:
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

    def end_claims(self, error: Exception) -> None:
        """Nobody will be told any more."""
        for answer in self._claim_answers.values():
            if not answer.done():
                answer.set_exception(error)

    def take(self, message: ParentToDoor) -> None:
        if isinstance(message, Claimed):
            claimed = self._claim_answers.get(message.number)
            if claimed is not None and not claimed.done():
                claimed.set_result(message)
        elif isinstance(message, Stop):
            self.stop_wanted = True
            self.changed.set()
        else:
            raise MalformedFrame(f"a {type(message).__name__} is not for a front door that runs")

    def lost(self) -> None:
        self.is_lost = True
        self.changed.set()

    def _beat(self) -> None:
        if self._transport is not None:
            self.send(Beat(self.num_away()))
            asyncio.get_running_loop().call_later(BEAT_S, self._beat)
