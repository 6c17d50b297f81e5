"""Schedulers with a scripted planner each, whose front doors reach the planners of the others; front doors by hand."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from coppice.addresses import Address
from coppice.edge.wire import Splitter, packed
from coppice.ids import WorkerId
from coppice.tls.credentials import Credentials
from coppice_scheduler.edge.base.engine import ModelInfo
from coppice_scheduler.edge.ipc.door_engine import DoorEngine
from coppice_scheduler.edge.ipc.door_messages import (
    DOOR_TO_PLANNER,
    MESSAGE_BYTES_MAX,
    PEERS_VERSION,
    PLANNER_TO_DOOR,
    Opened,
    PeerDoor,
)
from coppice_scheduler.edge.ipc.links import ParentLink, PlannerLink
from coppice_scheduler.edge.planner.peers.channel import PeerGate, PeerListener
from tests.fakes.scheduler.house import House, until
from tests.fakes.waiting import WAIT_S

MODEL = ModelInfo("m", 64, 0, 100)
WORKERS = tuple(WorkerId(f"w{place}") for place in range(3))


@dataclass
class Cell:
    """Schedulers with a planner each; `addresses`: where front doors of others reach it."""

    houses: list[House]
    addresses: list[Address] = field(default_factory=list)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def listen(self, house: House, tls: Credentials | None = None) -> Address:
        listener = socket.create_server(("127.0.0.1", 0))
        self.stack.callback(listener.close)
        peers = PeerListener(listener, house.doors, PeerGate(MODEL, tls))
        self.stack.callback(peers.close)
        peers.start()
        return Address("127.0.0.1", listener.getsockname()[1])

    async def door(
        self, number: int, own: House | None, *others: Address, tls: Credentials | None = None, model: ModelInfo = MODEL
    ) -> DoorEngine:
        """A front door of `own`'s scheduler, which looks for the planners at the other addresses."""
        loop = asyncio.get_running_loop()

        async def reach(link: PlannerLink) -> object:
            if own is None or own.is_without_planner:
                raise ConnectionRefusedError("nobody is there")
            return await loop.create_connection(lambda: link, sock=own.connect())

        engine = DoorEngine(number, model, [reach], ParentLink())
        instance = b"none" if own is None else own.workers[0].encode()
        tasks = [
            asyncio.create_task(engine.keep_planners()),
            asyncio.create_task(engine.keep_peers(others, tls, instance)),
        ]

        async def end() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.01)

        self.stack.push_async_callback(end)
        return engine


@asynccontextmanager
async def _cell(count: int) -> Any:
    cell = Cell([House(workers=(worker,)) for worker in WORKERS[:count]])
    try:
        async with cell.stack:
            cell.addresses = [cell.listen(house) for house in cell.houses]
            yield cell
    finally:
        for house in cell.houses:
            await asyncio.to_thread(house.stop)


def with_cell(count: int, test: Callable[[Cell], Awaitable[None]]) -> None:
    async def go() -> None:
        async with _cell(count) as cell:
            await asyncio.wait_for(test(cell), WAIT_S)

    asyncio.run(go())


async def has(engine: DoorEngine, count: int) -> None:
    """Planners that are there and ready."""
    await until(lambda: sum(port.is_there and port.state.ready for port in engine._ports) == count)


# ---- a front door by hand ----


def opened(door: int = 0, **fields: Any) -> Opened:
    return Opened(door, replace(PeerDoor(PEERS_VERSION, "m", 100, 64, b"far"), **fields))


class Raw:
    def __init__(self, address: Address, first: Any) -> None:
        self.socket = socket.create_connection((address.host, address.port), timeout=WAIT_S)
        self.incoming = Splitter(MESSAGE_BYTES_MAX)
        self.waiting: list[Any] = []
        self.heard: list[Any] = []
        if first is not None:
            self.say(first)

    def say(self, message: Any) -> None:
        self.socket.sendall(packed(DOOR_TO_PLANNER.encode(message)))

    def hear(self, kind: type) -> Any:
        """The next of this kind."""
        while True:
            while self.waiting:
                message = self.waiting.pop(0)
                self.heard.append(message)
                if isinstance(message, kind):
                    return message
            data = self.socket.recv(65536)
            assert data, f"closed; it said {self.heard}"
            self.incoming.feed(data)
            self.waiting += [PLANNER_TO_DOOR.decode(each) for each in self.incoming.split()]

    def is_closed(self) -> bool:
        """Waits for it."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        self.close()
        return True

    def close(self) -> None:
        self.socket.close()


async def cut_peers(house: House) -> None:
    for door in list(house.doors._doors.values()):
        if door.peer:
            sent: Any = door.channel
            await asyncio.to_thread(sent.close)
