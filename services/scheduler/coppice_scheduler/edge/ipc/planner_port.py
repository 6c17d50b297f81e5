"""One planner, and those that come after it, as a front door sees them: what it is asked, and how it is.

    ask, cancel, abort, look_up --collected for a turn of the loop, or a moment of a long one--> Asks --> planner
    Turn --> `Told.turn`        PlannerState --> what is known of it        Tenants --> `Told.tenants`

What is at work when a planner is lost is brought to another by `DoorEngine`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec.structs import replace

from coppice_scheduler.core.policy.placement import PlannerLoad
from coppice_scheduler.core.state.request import Finish, LookedUp, Lookup, Request
from coppice_scheduler.core.state.workers import DECODE_LOAD_TOKENS
from coppice_scheduler.edge.base.engine import NO_STATS, OUTAGE_S
from coppice_scheduler.edge.ipc.door_messages import (
    Abort,
    Asks,
    Cancel,
    Named,
    NotTaken,
    Opened,
    PlannerState,
    PlannerToDoor,
    Tenants,
    Turn,
)
from coppice_scheduler.edge.ipc.links import PlannerLink
from coppice_scheduler.edge.ipc.underway import Underway
from coppice_scheduler.edge.text.streams import Stream

_log = logging.getLogger("coppice.scheduler")
COLLECT_S = 0.001  # many requests that come at once need not wait for the last of them to be read
REACH_AGAIN_S = 0.02

Reach = Callable[[PlannerLink], Awaitable[object]]  # connect it to the planner of now; raises OSError


class Told(Protocol):
    """Who hears of a planner."""

    def came(self, port: PlannerPort) -> None: ...

    def turn(self, port: PlannerPort, turn: Turn) -> None: ...

    def tenants(self, port: PlannerPort) -> None: ...

    def state_changed(self, port: PlannerPort) -> None:
        """Whether it is ready, or stranded, is otherwise than before."""
        ...

    def lost(self, port: PlannerPort, *, has_heard: bool) -> None:
        """`has_heard`: it had said something, so what it was asked for reached it."""
        ...


class PlannerPort:
    is_peer = False  # its planner is another scheduler's

    def __init__(self, door: int, place: int, reach: Reach, told: Told) -> None:
        """`place`: which of the planners."""
        self.key = place.to_bytes(4, "little")  # until it has said its own
        self._door = door
        self._reach = reach
        self._told = told
        self._link: PlannerLink | None = None
        self._streams: list[Stream] = []  # not asked for yet, nor the others
        self._cancels: list[Cancel] = []
        self._aborts: list[Abort] = []
        self._lookups: list[Lookup] = []
        self._collecting_since_s = 0.0
        self._lost_s: float | None = None  # since when there is none; None: there is, or never was
        self._underway = Underway()
        self._left: set[str] = set()  # request ids that were taken from it, until it has said that they ended
        self.state = PlannerState(False, False, NO_STATS)
        self.content: bytes | None = None  # the tenants file that it has, as it said

    @property
    def is_there(self) -> bool:
        return self._link is not None

    @property
    def accepts(self) -> bool:
        """New requests, also while it is gone for a short time."""
        if self._lost_s is not None:
            return asyncio.get_running_loop().time() - self._lost_s < OUTAGE_S
        return self.state.accepts

    @property
    def is_stranded(self) -> bool:
        """It is there and has no worker; or nothing was heard of it yet, as one can be connected to before it runs."""
        return self._link is not None and (self.state.is_stranded or not self._link.has_heard)

    @property
    def load(self) -> PlannerLoad:
        state = self.state
        load_tokens = state.load_tokens + self._underway.num_tokens
        return PlannerLoad(self.is_there and state.ready, state.num_blocks, load_tokens, len(state.workers))

    def matched(self, request: Request, found: LookedUp) -> int:
        """Tokens that the best of its workers has, or will have when what was sent there is computed."""
        hints = zip(found.worker_ids, found.num_cached_tokens, strict=True)
        cached = max((count for worker_id, count in hints if worker_id in self.state.workers), default=0)
        return max(cached, self._underway.matched(request))

    # ---- what it is asked ----

    def ask(self, stream: Stream, num_tokens: int) -> None:
        """`num_tokens`: that will be computed before its first one."""
        self._underway.add(stream.request, max(num_tokens, DECODE_LOAD_TOKENS))
        self._streams.append(stream)
        self._send_soon()

    def ended(self, request_id: str) -> None:
        """It stands before nobody any more."""
        self._underway.ended(request_id)

    def cancel(self, cancel: Cancel) -> None:
        self._cancels.append(cancel)
        self._send_soon()

    def leave(self, request_id: str) -> None:
        """It goes on elsewhere: what is said of it here no more counts."""
        self.ended(request_id)
        self._left.add(request_id)
        self.cancel(Cancel(request_id, Finish.CANCELLED))

    def abort(self, abort: Abort) -> None:
        self._aborts.append(abort)
        self._send_soon()

    def look_up(self, lookup: Lookup) -> None:
        self._lookups.append(lookup)
        self._send_soon()

    @property
    def _num_collected(self) -> int:
        return len(self._streams) + len(self._cancels) + len(self._aborts) + len(self._lookups)

    def _send_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._num_collected == 1:
            self._collecting_since_s = loop.time()
            loop.call_soon(self.send)
        elif loop.time() - self._collecting_since_s > COLLECT_S:
            self.send()

    def send(self) -> None:
        """What was collected. Without a planner it is forgotten."""
        if self._link is not None and self._num_collected:
            requests = tuple(stream.to_ask for stream in self._streams)
            for stream in self._streams:
                stream.is_asked = True
            self._link.send(Asks(requests, tuple(self._cancels), tuple(self._aborts), tuple(self._lookups)))
        self._forget()

    def _forget(self) -> None:
        self._streams.clear()
        self._cancels.clear()
        self._aborts.clear()
        self._lookups.clear()

    def _without_left(self, turn: Turn) -> Turn:
        """Its tokens are not looked for: the stream has another number now."""
        left = self._left
        refusals = tuple(refusal for refusal in turn.refusals if refusal.request_id not in left)
        outputs = tuple(output for output in turn.outputs if output.request_id not in left)
        granted = tuple(one for one in turn.granted if one.request_id not in left)
        left.difference_update(refusal.request_id for refusal in turn.refusals)
        left.difference_update(output.request_id for output in turn.outputs if output.finish is not None)
        return replace(turn, refusals=refusals, outputs=outputs, granted=granted)

    # ---- whether it is there ----

    async def keep(self) -> None:
        """Have a planner, one after the other, for ever."""
        while True:
            link = PlannerLink(self._take)
            try:
                await self._reach(link)
            except OSError as error:
                _log.debug("no planner is to be reached: %s", error)
                await asyncio.sleep(REACH_AGAIN_S)
                continue
            self._link = link
            link.send(Opened(self._door))
            self._told.came(self)
            await link.is_over.wait()
            self._planner_lost(link)

    def _planner_lost(self, link: PlannerLink) -> None:
        self._link, self._lost_s = None, asyncio.get_running_loop().time()
        self._underway.clear()
        self.state = PlannerState(False, False, self.state.stats, self.state.tenants_refused)
        self.content = None
        self._left.clear()
        self._forget()
        self._told.lost(self, has_heard=link.has_heard)

    def _take(self, message: PlannerToDoor) -> None:
        if isinstance(message, PlannerState):
            is_other = (message.ready, message.is_stranded) != (self.state.ready, self.state.is_stranded)
            self.state, self._lost_s = message, None
            self._underway.counted()
            if is_other:
                self._told.state_changed(self)
        elif isinstance(message, Tenants):
            self.content = message.content
            self._told.tenants(self)
        elif isinstance(message, Named):
            self.key = message.instance
        elif isinstance(message, NotTaken):
            _log.error("a planner does not serve this front door: %s", message.why)
        else:
            turn = self._without_left(message) if self._left else message
            self._underway.began(turn)
            self._told.turn(self, turn)
