"""Messages of a front door (`coppice.edge.wire`): to its parent, and to each planner.

parent -> door    Start, then Stop
door -> parent    Serving or CannotServe, then Beat (each second)
    of calls with an `Idempotency-Key`: Claim to the parent, Claimed to the door, Settled to the parent

door -> planner   Opened, then Asks (one per turn of its loop)
planner -> door   Named, then PlannerState (at changes, and a few times a second), Turn (one per turn), Tenants

Front doors speak to the planners of other schedulers as to their own, over TCP: with Beat (each second), without
Tenants. A planner that serves another model, or is of another build, says NotTaken in place of Named.

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
PEERS_VERSION = 4  # of all that a door and a planner say to each other; any change of that is another version


class Start(Message, frozen=True):
    """The first message to a front door."""

    door: int
    settings: str  # ServiceSettings as JSON, ports as they are really
    model: ModelInfo
    metrics_dir: str
    planners: tuple[str, ...]  # paths of the sockets where planners listen, one for each and those that come after it
    tenants: bytes = b""  # the tenants file as it counts; empty without one
    instance: bytes = b""  # of the scheduler; those of its planners begin with it


class Serving(Message, frozen=True):
    """The listeners are open."""


class CannotServe(Message, frozen=True):
    """Why a front door, or a planner, ends before it began, for a person."""

    exit_code: int
    what: str
    hint: str


class PeerDoor(Record, frozen=True):
    """What a front door of another scheduler says of itself. Planners of all builds read it: fields come at its end."""

    version: int  # PEERS_VERSION
    model_id: str
    vocab_size: int
    max_context: int
    instance: bytes  # of the front door: its newer connection takes the place of an older one


class Opened(Message, frozen=True):
    """The first message to a planner: which front door this is."""

    door: int
    peer: PeerDoor | None = None  # None: it is of the same scheduler


class Named(Message, frozen=True):
    """The first message of a planner that serves this front door."""

    instance: bytes  # the same to all front doors, and of those that come after it at its place


class NotTaken(Message, frozen=True):
    """Why this front door of another scheduler is not served. Front doors of all builds read it."""

    why: str


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

    num_away: int = 0  # requests at planners of other schedulers


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
    is_draining: bool = False  # its scheduler shuts down


class Tenants(Message, frozen=True):
    """The tenants file as it counts from now on. It was found to be right."""

    content: bytes


class Stop(Message, frozen=True):
    """Serve what is there, take nothing new, end."""


ParentToDoor = Start | Stop | Claimed
DoorToParent = Serving | CannotServe | Beat | Claim | Settled
DoorToPlanner = Opened | Asks | Beat
PlannerToDoor = PlannerState | Tenants | Turn | Named | NotTaken
PARENT_TO_DOOR: Codec[ParentToDoor] = Codec(ParentToDoor)
DOOR_TO_PARENT: Codec[DoorToParent] = Codec(DoorToParent)
DOOR_TO_PLANNER: Codec[DoorToPlanner] = Codec(DoorToPlanner)
PLANNER_TO_DOOR: Codec[PlannerToDoor] = Codec(PlannerToDoor)
