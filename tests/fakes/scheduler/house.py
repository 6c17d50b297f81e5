"""A planner and front doors over real sockets, in one process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from coppice.ids import DomainId, WorkerId
from coppice.messages.step import SamplingParams
from coppice_scheduler.core.state.request import Output, Request
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.idempotency import Claim, Settled
from coppice_scheduler.edge.ipc.door_engine import DoorEngine
from coppice_scheduler.edge.ipc.door_messages import DOOR_TO_PARENT, PARENT_TO_DOOR, DoorToParent, ParentToDoor
from coppice_scheduler.edge.ipc.links import ParentLink, PlannerLink
from coppice_scheduler.edge.ipc.message_channel import MessageChannel
from coppice_scheduler.edge.planner.door_channel import DoorChannel, open_door
from coppice_scheduler.edge.planner.doors import Doors
from coppice_scheduler.edge.processes.claims import Claims
from tests.fakes.api.engine import pack
from tests.fakes.cache.scripted_core import ScriptedCore
from tests.fakes.waiting import WAIT_S

MODEL = ModelInfo("m", 64, 0)


@dataclass
class House:
    """A planner on a scripted core, the parent of both sides, and the front doors that the test opens."""

    core: ScriptedCore = field(default_factory=ScriptedCore)
    failures: list[BaseException] = field(default_factory=list)
    channels: list[DoorChannel] = field(default_factory=list)  # of the planner of now
    parents: list[MessageChannel[ParentToDoor, DoorToParent]] = field(default_factory=list)
    cut_off: list[int] = field(default_factory=list)  # front doors that a planner took no more of
    claims: Claims = field(default_factory=Claims)
    keeping: list[asyncio.Task[None]] = field(default_factory=list)
    is_without_planner: bool = False
    workers: tuple[WorkerId, ...] = ()  # that each planner says it has

    def __post_init__(self) -> None:
        self.doors = self._planner()

    def _planner(self) -> Doors:
        core: Any = self.core
        core.workers = self.workers
        instance = "".join(self.workers).encode()
        doors = Doors(core, "127.0.0.1:1", "s", self.failures.append, instance=instance)
        doors.planner.open_workers = core.open_workers()
        doors.planner.start()
        return doors

    def connect(self, **options: int) -> socket.socket:
        """The far end of a new connection to the planner."""
        ours, theirs = socket.socketpair()
        self.channels.append(open_door(self.doors, ours, self.cut_off.append, **options))
        return theirs

    async def open(self, number: int) -> DoorEngine:
        """A front door that has its planner."""
        loop, parent = asyncio.get_running_loop(), ParentLink()

        async def reach(link: PlannerLink) -> object:
            if self.is_without_planner:
                raise ConnectionRefusedError("nobody is there")
            return await loop.create_connection(lambda: link, sock=self.connect())

        engine = DoorEngine(number, MODEL, [reach], parent)
        await loop.create_connection(lambda: parent, sock=self._parent_of(number))
        before = len(self.channels)
        self.keeping.append(asyncio.create_task(engine.keep_planners()))
        await until(lambda: len(self.channels) > before)
        await asyncio.sleep(0)
        return engine

    def _parent_of(self, number: int) -> socket.socket:
        ours, theirs = socket.socketpair()

        def received(message: DoorToParent) -> None:
            if isinstance(message, (Claim, Settled)):
                self.claims.heard(number, message)

        channel: MessageChannel[ParentToDoor, DoorToParent] = MessageChannel(
            ours, PARENT_TO_DOOR, DOOR_TO_PARENT, received, lambda: self.claims.close_door(number), peer="a front door"
        )
        self.claims.open_door(number, channel.send)
        self.parents.append(channel)
        channel.start()
        return theirs

    def lose_planner(self, *, for_good: bool = False) -> None:
        """As when its process dies: connections break, and nothing of what it knew is left. Then there is another."""
        self.is_without_planner = for_good
        channels, self.channels = self.channels, []
        lost, self.core = self.doors, ScriptedCore()
        self.doors = self._planner()
        for channel in channels:
            channel.close()
            channel.join()
        lost.planner.stop()

    def stop(self) -> None:
        for channel in (*self.channels, *self.parents):
            channel.close()
            channel.join()
        self.doors.planner.stop()


@asynccontextmanager
async def house() -> AsyncIterator[House]:
    built = House()
    try:
        yield built
    finally:
        for task in built.keeping:
            task.cancel()
        await asyncio.to_thread(built.stop)


def run(test: Callable[[House], Awaitable[None]]) -> None:
    async def in_house() -> None:
        async with house() as built:
            await asyncio.wait_for(test(built), WAIT_S)

    asyncio.run(in_house())


def request(name: str, tokens: list[int], tenant: str = "t", names: tuple[str, ...] = ()) -> Request:
    return Request(name, tenant, DomainId("d"), pack(tokens), SamplingParams(), 4, names=names)


async def read(engine: DoorEngine, name: str, tokens: list[int], *whose: Any) -> list[Output]:
    """All but the one that only says that the request was taken."""
    outputs = [output async for output in engine.generate(request(name, tokens, *whose))]
    return [output for output in outputs if output.tokens or output.finish]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)
