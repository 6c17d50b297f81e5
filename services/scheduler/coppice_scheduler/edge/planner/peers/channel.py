"""Where front doors of other schedulers reach this planner: a thread for each connection.

a stranger --TLS, Opened--> known --> a front door like any other, which says something each second
           --another model, another build--> NotTaken
           --silence, garbage, no role scheduler--> closed
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from coppice.edge.acceptor import Acceptor
from coppice.edge.codec import MalformedFrame
from coppice.edge.told_once import ToldOnce
from coppice.edge.wire import WireClosed, WireUntrusted
from coppice.tls.credentials import Credentials
from coppice.tls.rights import why_not_session
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.ipc.door_messages import (
    DOOR_TO_PLANNER,
    DOORS_MAX,
    PEERS_VERSION,
    PLANNER_TO_DOOR,
    Asks,
    Beat,
    DoorToPlanner,
    NotTaken,
    Opened,
    PeerDoor,
    PlannerToDoor,
)
from coppice_scheduler.edge.ipc.message_channel import MessageChannel
from coppice_scheduler.edge.planner.doors import Door, Doors

_log = logging.getLogger("coppice.scheduler")
KIND = "doors"  # of session, in the table of rights
CONNECTIONS_MAX = 256  # each keeps one thread and three descriptors
STRANGER_S = 10.0  # from the connection until it is known who that is
SILENT_S = 15.0  # a front door that is known says something each second


@dataclass(frozen=True, slots=True)
class PeerGate:
    """What front doors of other schedulers have to fit, and how they prove who they are."""

    model: ModelInfo
    tls: Credentials | None

    def why_not(self, peer: PeerDoor) -> str:
        """Why a front door is not served, for its operator; empty when it is."""
        if peer.version != PEERS_VERSION:
            return f"it speaks version {peer.version} of these messages, the planner {PEERS_VERSION}: builds differ"
        for what, theirs, ours in (
            ("the model", peer.model_id, self.model.id),
            ("the vocabulary", peer.vocab_size, self.model.vocab_size),
            ("the longest context", peer.max_context, self.model.max_context),
        ):
            if theirs != ours:
                return f"{what} differs: {str(theirs)[:80]} at the front door, {str(ours)[:80]} at the planner"
        return "" if peer.instance else "it does not say which front door it is"


class PeerListener:
    """Serves them from `start` on."""

    def __init__(self, listener: socket.socket, doors: Doors, gate: PeerGate) -> None:
        self._doors = doors
        self._gate = gate
        self._told = ToldOnce()
        self._acceptor = Acceptor(listener, self._begin, most=CONNECTIONS_MAX, what="front doors of other schedulers")

    def start(self) -> None:
        self._acceptor.start()

    def close(self) -> None:
        """Accept nobody any more."""
        self._acceptor.close()

    def _begin(self, connection: socket.socket, peer: object, over: Callable[[], None]) -> None:
        PeerChannel(self._doors, connection, self._gate, self._told, over).start()


class PeerChannel(MessageChannel[PlannerToDoor, DoorToPlanner]):
    """The connection of one of them. `gone` is called when it is over."""

    def __init__(
        self, doors: Doors, connection: socket.socket, gate: PeerGate, told: ToldOnce, gone: Callable[[], None]
    ) -> None:
        super().__init__(
            connection,
            PLANNER_TO_DOOR,
            DOOR_TO_PLANNER,
            self._take,
            self._over,
            peer="a front door of another scheduler",
        )
        self._doors = doors
        self._gate = gate
        self._told = told
        self._gone = gone
        self._door: Door | None = None

    def _greet(self) -> None:
        ends_s = time.monotonic() + STRANGER_S
        try:
            self._shake_hands(self._gate.tls)
            first = self._decode(self._wire.next(ends_s - time.monotonic()))
            if not isinstance(first, Opened) or first.peer is None:
                raise WireUntrusted("its first message does not say who it is")
            self._silent_s = SILENT_S
            if why_not := self._gate.why_not(first.peer):
                self._wire.write(self._encode(NotTaken(why_not)))
                self._wire.finish()
                raise WireUntrusted(why_not)
        except (WireUntrusted, MalformedFrame) as error:
            if self._told.is_new(str(error)):
                _log.warning("a front door of another scheduler is not served: %s", error)
            raise WireClosed(str(error)) from error
        self._wire.trust()
        self._door = Door(first.door & DOORS_MAX - 1, self, first.peer.instance)
        self._doors.opened(self._door)

    def _shake_hands(self, tls: Credentials | None) -> None:
        """Raises WireClosed, WireSilent."""
        if tls is not None:
            identity = self._wire.start_tls(tls.channel(is_server=True), STRANGER_S)
            if why_not := why_not_session(identity, KIND, ""):
                raise WireUntrusted(why_not)

    def _take(self, message: DoorToPlanner) -> None:
        assert self._door is not None
        if isinstance(message, Asks):
            self._doors.asked(self._door, message)
        elif not isinstance(message, Beat):
            raise MalformedFrame(f"a front door says {type(message).__name__} out of turn")

    def _over(self) -> None:
        if self._door is not None:
            self._doors.closed(self._door)
        self._gone()
