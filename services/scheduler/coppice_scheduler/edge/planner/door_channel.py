"""The planner's end of the connection of one front door of its scheduler: who it is, and what it asks for."""

from __future__ import annotations

import socket
from collections.abc import Callable

from coppice.edge.codec import MalformedFrame
from coppice_scheduler.edge.ipc.door_messages import (
    BACKLOG_BYTES_MAX,
    DOOR_TO_PLANNER,
    PLANNER_TO_DOOR,
    Asks,
    DoorToPlanner,
    Opened,
    PlannerToDoor,
)
from coppice_scheduler.edge.ipc.message_channel import MessageChannel
from coppice_scheduler.edge.planner.doors import Door, Doors

DoorChannel = MessageChannel[PlannerToDoor, DoorToPlanner]


def open_door(
    doors: Doors,
    connection: socket.socket,
    cut_off: Callable[[int], None],
    over: Callable[[], None] = lambda: None,
    *,
    backlog_bytes_max: int = BACKLOG_BYTES_MAX,
) -> DoorChannel:
    """Serve a front door that has come. `cut_off` hears its number when nothing more is taken of it;
    `over` is called when the connection is over, whoever it was."""
    known: list[Door] = []

    def received(message: DoorToPlanner) -> None:
        if isinstance(message, Asks) and known:
            doors.asked(known[0], message)
        elif isinstance(message, Opened) and not known:
            known.append(Door(message.door, channel))
            doors.opened(known[0])
        else:
            raise MalformedFrame(f"a front door says {type(message).__name__} out of turn")

    def closed() -> None:
        if known:
            doors.closed(known[0])
            cut_off(known[0].number)
        over()

    channel: DoorChannel = MessageChannel(
        connection,
        PLANNER_TO_DOOR,
        DOOR_TO_PLANNER,
        received,
        closed,
        peer="a front door",
        backlog_bytes_max=backlog_bytes_max,
    )
    channel.start()
    return channel
