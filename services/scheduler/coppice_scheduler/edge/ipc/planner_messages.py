"""Messages between a planner's process and its parent, on a Unix socket (`coppice.edge.wire`).

parent -> planner   Plan, then Tenants, TenantsRefused, Drain, Stop
planner -> parent   Standing (at changes, and a few times a second), CutOff; or CannotServe, and it ends
"""

from __future__ import annotations

from coppice.edge.codec import Codec
from coppice.messages.ownership import SessionName
from coppice.messages.record import Message
from coppice_scheduler.core.state.request import SchedulerStats
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.ipc.door_messages import CannotServe, Stop, Tenants


class Plan(Message, frozen=True):
    """The first message to a planner."""

    settings: str  # ServiceSettings as JSON
    model: ModelInfo
    instance: bytes  # that front doors know it by, and those that come after it
    tenants: bytes = b""  # the tenants file as it counts; empty without one
    tenants_refused: bool = False
    is_draining: bool = False
    succeeds: SessionName | None = None  # the session of the planner before it, which is gone


class TenantsRefused(Message, frozen=True):
    """Whether a newer tenants file than the one that counts is wrong."""

    is_refused: bool


class Drain(Message, frozen=True):
    """Take no new request; those at work end as they would."""


class Standing(Message, frozen=True):
    """How things are with the planner."""

    problems: tuple[str, ...]
    num_requests: int  # at work, of all front doors
    is_draining: bool
    stats: SchedulerStats
    cache_tenants_version: str | None = None  # as the cache service said last
    session: SessionName | None = None  # what whoever comes after this planner says to the cache service


class CutOff(Message, frozen=True):
    """This front door does not read, or says what is no message: it has to be started again."""

    door: int


ToPlanner = Plan | Tenants | TenantsRefused | Drain | Stop
FromPlanner = Standing | CutOff | CannotServe
TO_PLANNER: Codec[ToPlanner] = Codec(ToPlanner)
FROM_PLANNER: Codec[FromPlanner] = Codec(FromPlanner)
