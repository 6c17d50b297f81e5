"""Messages of a front door on its Unix sockets (`coppice.edge.wire`): to its parent, and to each planner.

parent -> door    Start, then Stop
door -> parent    Serving or CannotServe, then Beat (each second)
    of calls with an `Idempotency-Key`: Claim to the parent, Claimed to the door, Settled to the parent

door -> planner   Opened, then Asks (one per turn of its loop)
planner -> door   PlannerState (at changes, and a few times a second), Turn (one per turn), Tenants

The parent outlives planners: a door that loses one finds the next at the same place, and brings it what is at work.

An Abort may concern requests of other front doors. The answer to it follows, in a Turn, when they have ended. A Lookup
is asked where there are several planners; its answer follows in a Turn.
"""

from __future__ import annotations

from coppice.edge.codec import Codec
from coppice.ids import WorkerId
from coppice.messages.record import Message, Record
from coppice_scheduler.core.state.request import (
    Finish,
    Granted,
    LookedUp,
    Lookup,
    Output,
    OutputError,
    OutputErrorCode,
    Refused,
    Request,
    SchedulerStats,
    TokenBatch,
)
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.idempotency import Claim, Claimed, Settled

DOOR_SHIFT = 24  # a request's number names its door in the bits above
DOORS_MAX = 256  # at once, with those that died a moment ago
MESSAGE_BYTES_MAX = 512 * 1024 * 1024  # one turn carries the prompts of many requests, or their log-probabilities
BACKLOG_BYTES_MAX = 32 * 1024 * 1024


class Start(Message, frozen=True):
    """The first message to a front door."""

    door: int
    settings: str  # ServiceSettings as JSON, ports as they are really
    model: ModelInfo
    metrics_dir: str
    planners: tuple[str, ...]  # paths of the sockets where planners listen, one for each and those that come after it
    tenants: bytes = b""  # the tenants file as it counts; empty without one


class Serving(Message, frozen=True):
    """The listeners are open."""


class CannotServe(Message, frozen=True):
    """Why a front door, or a planner, ends before it began, for a person."""

    exit_code: int
    what: str
    hint: str


class Opened(Message, frozen=True):
    """The first message to a planner: which front door this is."""

    door: int


class Cancel(Record, frozen=True):
    request_id: str
    finish: Finish  # CANCELLED, or STOP where a stop string was found


class Abort(Record, frozen=True):
    """End what this tenant knows by one of these names, whichever front door has it."""

    number: int  # of the question; unique for its front door
    tenant: str
    names: tuple[str, ...]


ABORTED = OutputError(OutputErrorCode.ABORTED, "The request was aborted, as another call of its tenant asked.")


class Aborted(Record, frozen=True):
    number: int  # of the question
    num_requests: int  # that have ended with it; 0: the tenant has none of these names


class Asks(Message, frozen=True):
    """New requests, then cancels, then aborts, then lookups."""

    requests: tuple[Request, ...]
    cancels: tuple[Cancel, ...]
    aborts: tuple[Abort, ...] = ()
    lookups: tuple[Lookup, ...] = ()


class Beat(Message, frozen=True):
    """The door's loop turns."""


class RefusedRequest(Record, frozen=True):
    request_id: str
    refused: Refused


class Turn(Message, frozen=True):
    """What a turn of the planner made for one front door."""

    refusals: tuple[RefusedRequest, ...]
    tokens: tuple[TokenBatch, ...]
    outputs: tuple[Output, ...]
    aborted: tuple[Aborted, ...] = ()
    granted: tuple[Granted, ...] = ()
    looked_up: tuple[LookedUp, ...] = ()


class PlannerState(Message, frozen=True):
    """How things are with the planner."""

    ready: bool
    accepts: bool
    stats: SchedulerStats
    tenants_refused: bool = False  # a newer tenants file is wrong
    workers: tuple[WorkerId, ...] = ()  # those that it plans for and that take new requests
    num_blocks: int = 0  # of these workers together
    load_tokens: int = 0  # work that stands before a new request there, in tokens of prefill
    is_stranded: bool = False  # the cache service lists no worker for it, so nothing of its requests runs


class Tenants(Message, frozen=True):
    """The tenants file as it counts from now on. It was found to be right."""

    content: bytes


class Stop(Message, frozen=True):
    """Serve what is there, take nothing new, end."""


ParentToDoor = Start | Stop | Claimed
DoorToParent = Serving | CannotServe | Beat | Claim | Settled
DoorToPlanner = Opened | Asks
PlannerToDoor = PlannerState | Tenants | Turn
PARENT_TO_DOOR: Codec[ParentToDoor] = Codec(ParentToDoor)
DOOR_TO_PARENT: Codec[DoorToParent] = Codec(DoorToParent)
DOOR_TO_PLANNER: Codec[DoorToPlanner] = Codec(DoorToPlanner)
PLANNER_TO_DOOR: Codec[PlannerToDoor] = Codec(PlannerToDoor)
