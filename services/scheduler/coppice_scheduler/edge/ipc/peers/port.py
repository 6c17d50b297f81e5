"""One planner of another scheduler, at one address, as a front door sees it.

reach --TLS--> Opened --> Named --> it is a planner like any other, until it is lost
                      --> NotTaken, one of our own, one that is reached already: left alone for a while
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

from coppice.addresses import Address
from coppice.edge.told_once import Outage
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.ipc.door_messages import (
    BACKLOG_BYTES_MAX,
    PEERS_VERSION,
    Beat,
    Named,
    NotTaken,
    Opened,
    PeerDoor,
    PlannerState,
    PlannerToDoor,
)
from coppice_scheduler.edge.ipc.links import BEAT_S, PlannerLink
from coppice_scheduler.edge.ipc.planner_port import PlannerPort, Told

_log = logging.getLogger("coppice.scheduler")
GREET_S = 5.0  # to connect, shake hands and hear who it is
SILENT_S = 5.0  # it says something some times a second
AGAIN_FIRST_S = 0.1
AGAIN_LAST_S = 2.0
LEFT_S = 15.0  # that one is left alone which is not for us
TOLD_AFTER_S = 3.0  # what lasts longer is no restart
TOLD_AGAIN_S = 60.0
_INSTANCE_BYTES = 8

OF_OUR_OWN = "it is one of this scheduler"
ALREADY_REACHED = "it is reached at another address"

ReachPeer = Callable[[Address, PlannerLink], Awaitable[object]]  # raises OSError


class PeerLink(PlannerLink):
    """It is cut when it is silent, or does not read."""

    def __init__(self, take: Callable[[PlannerToDoor], None], address: Address) -> None:
        super().__init__(take, f"the planner at {address}")
        self._heard_s = 0.0

    def data_received(self, data: bytes) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        super().data_received(data)

    def beat(self) -> None:
        """Now, and each second as long as it lasts."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            return
        if loop.time() - self._heard_s > SILENT_S or self._transport.get_write_buffer_size() > BACKLOG_BYTES_MAX:
            _log.warning("%s says nothing, or does not read; its requests go on elsewhere", self._peer)
            self.cut()
            return
        self.send(Beat())
        loop.call_later(BEAT_S, self.beat)


class PeerPort(PlannerPort):
    """`why_not` says why the planner of an instance is not to be used here; empty when it is."""

    is_peer = True

    def __init__(
        self,
        door: int,
        address: Address,
        model: ModelInfo,
        reach: ReachPeer,
        told: Told,
        why_not: Callable[[bytes], str],
    ) -> None:
        super().__init__(door, 0, lambda link: reach(address, link), told)
        self._address = address
        who = PeerDoor(PEERS_VERSION, model.id, model.vocab_size, model.max_context, os.urandom(_INSTANCE_BYTES))
        self._opened = Opened(door, who)
        self._why_not = why_not
        self._answer: asyncio.Future[Named | NotTaken] | None = None  # while it is waited for
        self._was_reached = False
        self._outage = Outage(TOLD_AFTER_S, TOLD_AGAIN_S)

    async def keep(self) -> None:
        """Have the planner that is there, one after the other, for ever."""
        loop, again_s = asyncio.get_running_loop(), AGAIN_FIRST_S
        while True:
            self._outage.begin(loop.time())
            link = PeerLink(self._take, self._address)
            try:
                answer = await self._greeted(link)
                if isinstance(answer, Named):
                    again_s = AGAIN_FIRST_S
                    await self._serve(link, answer)
                else:
                    again_s = LEFT_S
                    if answer.why not in (OF_OUR_OWN, ALREADY_REACHED):
                        self._tell(answer.why, now=True)
            except OSError as error:
                self._tell(error.strerror or str(error) or "it does not answer")
            finally:
                link.cut()
            await asyncio.sleep(again_s)
            again_s = max(again_s, min(2 * again_s, AGAIN_LAST_S))

    async def _greeted(self, link: PeerLink) -> Named | NotTaken:
        """Who is there. Raises OSError."""
        answer = self._answer = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(GREET_S):
                await self._reach(link)
                link.send(self._opened)
                over = asyncio.ensure_future(link.is_over.wait())
                try:
                    await asyncio.wait({answer, over}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    over.cancel()
        finally:
            self._answer = None
        if not answer.done():
            raise ConnectionResetError("it closed the connection before it said who it is")
        named = answer.result()
        why_not = self._why_not(named.instance) if isinstance(named, Named) else ""
        return NotTaken(why_not) if why_not else named

    async def _serve(self, link: PeerLink, named: Named) -> None:
        """Until it is lost."""
        if self._outage.end() or not self._was_reached:
            self._was_reached = True
            _log.info("the planner of another scheduler at %s is reached", self._address)
        self.key = named.instance
        self._link = link
        link.beat()
        self._told.came(self)
        self._told.state_changed(self)
        try:
            await link.is_over.wait()
        finally:
            self._planner_lost(link)

    def _take(self, message: PlannerToDoor) -> None:
        if self._answer is not None:
            if isinstance(message, Named | NotTaken) and not self._answer.done():
                self._answer.set_result(message)
            elif isinstance(message, PlannerState):  # said in one breath
                self.state = message
        elif self._link is not None and not isinstance(message, Named | NotTaken):
            super()._take(message)

    def _tell(self, why: str, *, now: bool = False) -> None:
        """In the log, once it has lasted and from time to time; `now`: at once, as it will not change soon."""
        now_s = asyncio.get_running_loop().time()
        lasted_s = self._outage.to_tell_s(now_s + (TOLD_AFTER_S if now else 0.0), why)
        if lasted_s is not None:
            _log.warning("the planner at %s is not used by this front door: %s", self._address, why)
