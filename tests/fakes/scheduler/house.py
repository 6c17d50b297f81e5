"""A planner and front doors over real sockets, in one process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from coppice.ids import DomainId
from coppice.messages.step import SamplingParams
from coppice_scheduler.core.state.request import Output, Request
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.base.idempotency import Claim, Settled
from coppice_scheduler.edge.ipc.door_channel import DoorChannel
from coppice_scheduler.edge.ipc.door_engine import DoorEngine
from coppice_scheduler.edge.ipc.door_messages import Asks, FromDoor
from coppice_scheduler.edge.planner.doors import Door, Doors
from tests.fakes.api.engine import pack
from tests.fakes.cache.scripted_core import ScriptedCore
from tests.fakes.waiting import WAIT_S

MODEL = ModelInfo("m", 64, 0)


@dataclass
class House:
    """A planner on a scripted core, and the front doors that the test opens."""

    core: ScriptedCore = field(default_factory=ScriptedCore)
    failures: list[BaseException] = field(default_factory=list)
    channels: list[DoorChannel] = field(default_factory=list)

    def __post_init__(self) -> None:
        core: Any = self.core
        self.doors = Doors(core, "127.0.0.1:1", "s", self.failures.append)
        self.doors.planner.start()

    def connect(self, number: int, **options: Any) -> socket.socket:
        """The far end of a new front door's connection."""
        ours, theirs = socket.socketpair()

        def received(message: FromDoor) -> None:
            if isinstance(message, (Asks, Claim, Settled)):
                self.doors.heard(door, message)

        channel = DoorChannel(ours, received, lambda: self.doors.closed(door), **options)
        door = Door(number, channel)
        self.channels.append(channel)
        channel.start()
        self.doors.opened(door)
        return theirs

    async def open(self, number: int) -> DoorEngine:
        engine = DoorEngine(number, MODEL)
        await asyncio.get_running_loop().create_connection(lambda: engine, sock=self.connect(number))
        return engine

    def stop(self) -> None:
        for channel in self.channels:
            channel.close()
            channel.join()
        self.doors.planner.stop()


@asynccontextmanager
async def house() -> AsyncIterator[House]:
    built = House()
    try:
        yield built
    finally:
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
