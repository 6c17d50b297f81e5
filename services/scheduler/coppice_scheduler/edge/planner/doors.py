"""The planner's side of the front doors: who asked for what, and one message for each of them per turn.

    Asks  --planner's inbox-->  core.submit, core.cancel, core.end
    Effects of a turn  --split by door-->  Turn  --DoorChannel-->  front door

A front door that goes away takes its requests with it: they are cancelled in the next turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from coppice.messages.ownership import SessionName
from coppice.telemetry.logs import about_request
from coppice.tls.credentials import Credentials
from coppice_scheduler.core.engine import SchedulerCore, SubmitFailed
from coppice_scheduler.core.state.request import (
    Effects,
    Finish,
    Granted,
    LookedUp,
    Output,
    Refused,
    RefusedReason,
    Request,
    TokenBatch,
)
from coppice_scheduler.core.state.settings import TenantSettings
from coppice_scheduler.edge.base.engine import NO_STATS, OUTAGE_S
from coppice_scheduler.edge.ipc.door_messages import (
    ABORTED,
    DOOR_SHIFT,
    Abort,
    Aborted,
    Asks,
    Named,
    NotTaken,
    PlannerState,
    PlannerToDoor,
    RefusedRequest,
    Tenants,
    Turn,
)
from coppice_scheduler.edge.ipc.planner_messages import Standing
from coppice_scheduler.edge.planner.call_names import CallNames
from coppice_scheduler.edge.planner.peers.slots import PEER_DOORS_MAX, Slots, asks_in, batch_out, renumbered
from coppice_scheduler.edge.planner.planner import STATS_EVERY_NS, OpenWorkers, Planner
from coppice_scheduler.edge.planner.refusals import RefusalLog
from coppice_scheduler.edge.text.tokenizer import TOKEN_DTYPE

_log = logging.getLogger("coppice.scheduler")


class Channel(Protocol):
    def send(self, message: PlannerToDoor) -> None:
        """Never blocks; drops the message when the front door is gone."""
        ...


@dataclass(slots=True, eq=False)
class Door:
    """One front door as the planner knows it. Touched in the planner's turns only."""

    number: int  # in the high bits of its requests' numbers, as it has them
    channel: Channel
    peer: bytes = b""  # the instance of a front door of another scheduler; empty: it is of this one
    slot: int | None = None  # in the high bits of its requests' numbers here; None: it is not served
    refusals: list[RefusedRequest] = field(default_factory=list)  # since the last turn
    taken: list[Output] = field(default_factory=list)  # without tokens: that streams were taken, since the last turn
    aborted: list[Aborted] = field(default_factory=list)  # since the last turn
    granted: list[Granted] = field(default_factory=list)  # since the last turn
    looked_up: list[LookedUp] = field(default_factory=list)  # since the last turn
    requests: set[str] = field(default_factory=set)  # at work

    @property
    def has_news(self) -> bool:
        return bool(self.refusals or self.aborted or self.granted or self.looked_up)

    def turn(self, tokens: tuple[TokenBatch, ...], outputs: tuple[Output, ...]) -> Turn:
        """All that it is told, `taken` among the outputs."""
        looked_up = tuple(self.looked_up)
        if self.slot != self.number:
            tokens = tuple(batch_out(batch, self.number) for batch in tokens)
            looked_up = tuple(replace(one, number=renumbered(one.number, self.number)) for one in looked_up)
        turn = Turn(tuple(self.refusals), tokens, outputs, tuple(self.aborted), tuple(self.granted), looked_up)
        for told in (self.refusals, self.taken, self.aborted, self.granted, self.looked_up):
            told.clear()
        return turn


class Doors:
    """All front doors of a planner. Its methods may be called from any thread."""

    def __init__(
        self,
        core: SchedulerCore,
        cache_address: str,
        name: str,
        failed: Callable[[BaseException], None],
        *,
        tls: Credentials | None = None,
        succeeds: SessionName | None = None,
        told: Callable[[Standing], None] = lambda standing: None,
        instance: bytes = b"",
    ) -> None:
        """`succeeds`: the session of the planner before it. `told` hears how things are as front doors do, in turns.
        `instance`: what front doors know it by."""
        self.planner = Planner(core, cache_address, name, self._deliver, failed, tls=tls, succeeds=succeeds)
        self._told = told
        self._instance = instance
        self._slots = Slots()
        self._doors: dict[int, Door] = {}  # by slot
        self._door_of: dict[str, Door] = {}  # by request id
        self._names = CallNames()
        self._draining = False
        self._standing: tuple[bool, bool, bool, OpenWorkers] | None = None  # as last told
        self._told_ns = 0
        self._refusal_log = RefusalLog()
        self._tenants: Tenants | None = None  # what counts, where it changed since the start
        self._tenants_refused = False

    @property
    def num_requests(self) -> int:
        """At work, over all front doors."""
        return len(self._door_of)

    def opened(self, door: Door) -> None:
        """`door` serves now; it hears at once how things are. One of another scheduler may be one too many."""

        def in_turn() -> None:
            door.slot = self._slot_of(door)
            if door.slot is None:
                door.channel.send(NotTaken(f"it serves {PEER_DOORS_MAX} front doors of other schedulers already"))
                return
            self._doors[door.slot] = door
            self._standing = None
            door.channel.send(Named(self._instance))
            if self._tenants is not None and not door.peer:
                door.channel.send(self._tenants)

        self.planner.later(in_turn)

    def set_tenants(self, settings: TenantSettings, content: bytes) -> None:
        """The tenants file changed: the core knows it before any front door does."""

        def in_turn() -> None:
            self.planner.core.set_tenants(settings, time.monotonic_ns())
            self._tenants = Tenants(content)
            for door in self._doors.values():
                if not door.peer:  # another scheduler has a file of its own
                    door.channel.send(self._tenants)

        self.planner.later(in_turn)

    def tenants_refused(self, is_refused: bool) -> None:
        """Whether a newer tenants file is wrong; front doors say so to who asks whether they are ready."""

        def in_turn() -> None:
            self._tenants_refused = is_refused
            self._standing = None

        self.planner.later(in_turn)

    def asked(self, door: Door, asks: Asks) -> None:
        self.planner.later(lambda: self._ask(door, asks))

    def closed(self, door: Door) -> None:
        """`door` is gone. Whatever it asked for is cancelled."""
        self.planner.later(lambda: self._close(door))

    def drain(self) -> None:
        """Take no new request."""

        def in_turn() -> None:
            self._draining = True
            self._standing = None
            self.planner.core.drain()

        self.planner.later(in_turn)

    # ---- in the planner's turns ----

    def _slot_of(self, door: Door) -> int | None:
        if not door.peer:
            return self._slots.take(door.number)
        for other in list(self._doors.values()):
            if other.peer == door.peer:  # its end has not been noticed here yet; what was there comes again
                self._close(other)
        return self._slots.take_for_peer()

    def _ask(self, door: Door, asks: Asks) -> None:
        if door.slot is None:
            return
        if door.slot != door.number:
            asks = asks_in(asks, door.slot)
        now_ns = time.monotonic_ns()
        refused: dict[tuple[str, ...], Refused] = {}  # by names of the call
        for request in asks.requests:
            why = refused.get(request.names) or self._submit(door, request, now_ns)
            if why is None:
                continue
            door.refusals.append(RefusedRequest(request.request_id, why))
            if request.names:  # its front door ends the whole call
                refused[request.names] = why
        for cancel in asks.cancels:
            if self._door_of.get(cancel.request_id) is door:
                self.planner.core.cancel(cancel.request_id, now_ns, cancel.finish)
        for abort in asks.aborts:
            door.aborted.append(Aborted(abort.number, self._abort(abort, now_ns)))
        for lookup in asks.lookups:
            self.planner.core.look_up(lookup)

    def _abort(self, abort: Abort, now_ns: int) -> int:
        """The number of requests that ended; what ended earlier in this turn is none of them."""
        request_ids = self._names.find(abort.tenant, abort.names)
        return sum(self.planner.core.end(request_id, ABORTED, now_ns) for request_id in request_ids)

    def _submit(self, door: Door, request: Request, now_ns: int) -> Refused | None:
        refused = self._decided(request, now_ns)
        if refused is not None:
            self._refusal_log.refused(request, refused, self.planner.stats, now_ns)
            return refused
        if request.streams:
            door.taken.append(Output(request.request_id, b""))
        door.requests.add(request.request_id)
        self._door_of[request.request_id] = door
        self._names.add(request)
        return None

    def _decided(self, request: Request, now_ns: int) -> Refused | None:
        """The core's word on it. A fault that changed nothing is this request's alone; any other ends the planner."""
        if request.request_id in self._door_of:  # the core takes that for a fault of ours
            return Refused(RefusedReason.INTERNAL, "A request of the same id is at work. Send it again.", 0)
        try:
            return self.planner.core.submit(request, now_ns)
        except SubmitFailed:
            with about_request(request.request_id):
                _log.exception("a request of tenant %s is refused, for a fault of ours", request.tenant)
            return Refused(RefusedReason.INTERNAL, "The server failed on this request. It has been logged.", 0)

    def _close(self, door: Door) -> None:
        if door.slot is not None:
            del self._doors[door.slot]
            self._slots.give_back(door.slot, is_peer=bool(door.peer))
            door.slot = None
        now_ns = time.monotonic_ns()
        for request_id in door.requests:
            del self._door_of[request_id]
            self._names.remove(request_id)
            self.planner.core.cancel(request_id, now_ns, Finish.CANCELLED)
        door.requests.clear()

    def _deliver(self, effects: Effects) -> None:
        for granted in effects.granted:
            door = self._door_of.get(granted.request_id)
            if door is not None:
                door.granted.append(granted)
        tokens = by_door(effects.tokens)
        outputs = {slot: list(door.taken) for slot, door in self._doors.items() if door.taken}
        for output in effects.outputs:
            door = self._door_of.get(output.request_id)
            if door is not None and door.slot is not None:
                outputs.setdefault(door.slot, []).append(output)
                if output.finish is not None:
                    del self._door_of[output.request_id]
                    self._names.remove(output.request_id)
                    door.requests.remove(output.request_id)
        for looked_up in effects.looked_up:
            door = self._doors.get(looked_up.number >> DOOR_SHIFT)
            if door is not None:
                door.looked_up.append(looked_up)
        for slot, door in self._doors.items():
            if slot in tokens or slot in outputs or door.has_news:
                door.channel.send(door.turn(tuple(tokens.get(slot, ())), tuple(outputs.get(slot, ()))))
        self._tell()

    def _tell(self) -> None:
        """Tell all front doors how things are: at once when it changed, else a few times a second."""
        planner = self.planner
        ready = not self._draining and not planner.problems
        accepts = not self._draining and planner.seconds_in_trouble < OUTAGE_S
        standing = (ready, accepts, planner.is_stranded, planner.open_workers)
        now_ns = time.monotonic_ns()
        if standing == self._standing and now_ns - self._told_ns < STATS_EVERY_NS:
            return
        self._standing, self._told_ns = standing, now_ns
        state = PlannerState(
            ready,
            accepts,
            planner.stats,
            self._tenants_refused,
            workers=tuple(name for name, _ in planner.open_workers),
            num_blocks=sum(count for _, count in planner.open_workers),
            load_tokens=planner.core.load_tokens() if self._doors else 0,
            is_stranded=planner.is_stranded,
            is_draining=self._draining,
        )
        to_peers = replace(state, stats=NO_STATS, tenants_refused=False)  # which name our tenants
        for door in self._doors.values():
            door.channel.send(to_peers if door.peer else state)
        self._told(
            Standing(
                planner.problems,
                self.num_requests,
                self._draining,
                planner.stats,
                planner.cache_tenants_version,
                planner.session,
            )
        )


def by_door(batches: Iterable[TokenBatch]) -> dict[int, list[TokenBatch]]:
    """The batches of each front door by its slot, as the numbers of their requests name it."""
    found: dict[int, list[TokenBatch]] = {}
    for batch in batches:
        for door, part in _parts(batch):
            found.setdefault(door, []).append(part)
    return found


def _parts(batch: TokenBatch) -> Iterator[tuple[int, TokenBatch]]:
    numbers = np.frombuffer(batch.numbers, dtype=TOKEN_DTYPE)
    if not numbers.size:
        return
    doors = numbers >> DOOR_SHIFT
    if (doors == doors[0]).all():
        yield int(doors[0]), batch
        return
    tokens = np.frombuffer(batch.tokens, dtype=TOKEN_DTYPE)
    for door in np.unique(doors):
        of_door = doors == door
        yield int(door), TokenBatch(numbers[of_door].tobytes(), tokens[of_door].tobytes())
