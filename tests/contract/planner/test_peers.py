"""A front door with planners of several schedulers."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest
from msgspec.structs import replace

from coppice.addresses import Address
from coppice.edge.wire import packed
from coppice_scheduler.core.state.request import Output, RefusedReason
from coppice_scheduler.edge.base.engine import RequestRefused
from coppice_scheduler.edge.ipc import placing
from coppice_scheduler.edge.ipc.door_messages import (
    PLANNER_TO_DOOR,
    Named,
)
from coppice_scheduler.edge.ipc.links import PlannerLink
from coppice_scheduler.edge.ipc.peers import peers, port
from coppice_scheduler.edge.planner.planner import Planner
from tests.contract.planner.test_planner_lost import LONG, reading, tokens_of
from tests.contract.planner.test_several_planners import hanging
from tests.fakes.scheduler.house import request, until
from tests.fakes.scheduler.peers import MODEL, WORKERS, Cell, cut_peers, has, with_cell
from tests.fakes.waiting import WAIT_S


@pytest.fixture(autouse=True)
def _all_are_ready_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted planners have no cache service."""
    monkeypatch.setattr(Planner, "problems", property(lambda planner: ()))
    monkeypatch.setattr(peers, "LOOK_S", 0.05)
    monkeypatch.setattr(placing, "LOOKUP_S", WAIT_S)


# ---- a front door with planners of several schedulers ----


def test_a_prompt_is_found_where_another_scheduler_has_it_cached() -> None:
    async def test(cell: Cell) -> None:
        door = await cell.door(0, cell.houses[0], *cell.addresses)
        await has(door, 2)
        for house in cell.houses:
            house.core.hints = WORKERS[1:2], (32,)
        outputs: list[Output] = []
        task = reading(door, hanging("r"), outputs)
        await until(lambda: "r" in cell.houses[1].core.running)
        assert door._parent.num_away() == 1
        door.finish("r")
        await task
        assert door._parent.num_away() == 0

    with_cell(2, test)


def test_all_front_doors_have_the_same_home_for_a_prompt() -> None:
    async def test(cell: Cell) -> None:
        doors = [await cell.door(0, house, *cell.addresses) for house in cell.houses]
        for door in doors:
            await has(door, 3)
            assert sorted(port.key for port in door._ports) == [b"w0", b"w1", b"w2"]

    with_cell(3, test)


def test_streams_go_on_at_the_planner_of_another_scheduler_and_back() -> None:
    async def test(cell: Cell) -> None:
        door = await cell.door(0, cell.houses[0], *cell.addresses)
        await has(door, 2)
        outputs: list[list[Output]] = [[] for _ in range(6)]
        tasks = [reading(door, request(f"r{place}", [place, *LONG]), into) for place, into in enumerate(outputs)]
        await until(lambda: all(len(tokens_of(into)) > 5 for into in outputs))
        await asyncio.to_thread(cell.houses[0].lose_planner, for_good=True)
        await asyncio.gather(*tasks)
        assert [tokens_of(into) for into in outputs] == [[place, *LONG] for place in range(6)]
        assert cell.houses[1].core.resumed
        assert door.ready
        cell.houses[0].is_without_planner = False
        await has(door, 2)
        back: list[Output] = []
        task = reading(door, hanging("back"), back)
        await until(lambda: any("back" in house.core.running for house in cell.houses))
        await cut_peers(cell.houses[1])
        await until(lambda: "back" in cell.houses[0].core.running or "back" in cell.houses[1].core.running)
        await has(door, 2)
        door.finish("back")
        await task

    with_cell(2, test)


@pytest.mark.parametrize("reason", [RefusedReason.DRAINING, RefusedReason.TENANT_REMOVED])
def test_what_another_scheduler_refuses_for_its_own_reasons_is_served_here(reason: RefusedReason) -> None:
    async def test(cell: Cell) -> None:
        door = await cell.door(0, cell.houses[0], *cell.addresses)
        await has(door, 2)
        for house in cell.houses:
            house.core.hints = WORKERS[1:2], (32,)
        core = cell.houses[1].core
        core.refuses = reason
        outputs: list[Output] = []
        await reading(door, request("r", [*LONG]), outputs)
        assert tokens_of(outputs) == LONG
        assert "r" in core.submitted
        assert cell.houses[0].core.resumed == {}, "it is as new there"
        core.refuses = RefusedReason.QUEUE_FULL
        with pytest.raises(RequestRefused):
            await reading(door, request("full", [*LONG]), [])
        cell.houses[0].core.refuses = reason
        core.refuses = reason
        with pytest.raises(RequestRefused):
            await reading(door, request("nowhere", [*LONG]), [])

    with_cell(2, test)


def test_while_its_own_scheduler_shuts_down_a_front_door_takes_nothing_new() -> None:
    async def test(cell: Cell) -> None:
        door = await cell.door(0, cell.houses[0], *cell.addresses)
        await has(door, 2)
        assert door.ready
        assert door.accepts
        cell.houses[0].doors.drain()
        await until(lambda: not door.ready)
        assert not door.accepts

    with_cell(2, test)


def test_its_own_planner_and_one_that_is_there_twice_are_left() -> None:
    async def test(cell: Cell) -> None:
        twice = cell.listen(cell.houses[1])
        door = await cell.door(0, cell.houses[0], *cell.addresses, twice)
        await has(door, 2)
        await until(lambda: len(cell.houses[1].doors._doors) == 1)
        await asyncio.sleep(0.1)
        assert sorted(port.key for port in door._ports) == [b"w0", b"w1"]

    with_cell(2, test)


def test_peers_come_and_go_with_what_their_name_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(cell: Cell) -> None:
        there = [cell.addresses[1]]

        async def getaddrinfo(host: str, number: int, **_: Any) -> list[Any]:
            assert (host, number) == ("headless", 1)
            if not there:
                raise socket.gaierror(socket.EAI_NONAME, "no such name")
            return [(0, 0, 0, "", (address.host, 1)) for address in there]

        reachable = True

        async def reach(address: Address, link: PlannerLink) -> object:
            if not reachable:
                raise ConnectionRefusedError("nobody is there")
            return await loop.create_connection(lambda: link, "127.0.0.1", there[0].port)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo, raising=False)
        ports: list[port.PeerPort] = []

        def port_at(address: Address) -> port.PeerPort:
            told: Any = door
            ports.append(port.PeerPort(0, address, MODEL, reach, told, lambda instance: ""))
            return ports[-1]

        door = await cell.door(0, cell.houses[0])
        looking = peers.Peers([Address("headless", 1)], port_at)
        task = asyncio.create_task(looking.keep())
        await has(door, 2)
        there.clear()
        await asyncio.sleep(0.1)
        assert door._ports[-1].is_there, "a name that is not found takes none away"
        there.append(Address("127.0.0.2", cell.addresses[1].port))
        await until(lambda: len(ports) == 2)
        await asyncio.sleep(0.2)
        assert ports[0].is_there, "its name has another address now, but it serves"
        reachable = False
        await cut_peers(cell.houses[1])
        await until(lambda: looking._keeping.keys() == {Address("127.0.0.2", 1)})
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with_cell(2, test)


def test_one_that_cannot_be_reached_is_named_once_and_from_time_to_time(caplog: pytest.LogCaptureFixture) -> None:
    async def test(cell: Cell) -> None:
        nobody = Address("127.0.0.1", 1)
        with caplog.at_level(logging.WARNING):
            await cell.door(0, cell.houses[0], nobody)
            await until(lambda: "127.0.0.1:1 is not used" in caplog.text)
            await asyncio.sleep(0.5)
        assert caplog.text.count("127.0.0.1:1 is not used") == 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(port, "TOLD_AFTER_S", 0.0)
        with_cell(1, test)


def test_a_front_door_of_another_model_is_not_served_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def test(cell: Cell) -> None:
        with caplog.at_level(logging.WARNING):
            door = await cell.door(0, cell.houses[0], cell.addresses[1], model=replace(MODEL, vocab_size=5))
            await until(lambda: "the vocabulary differs: 5 at the front door" in caplog.text)
        assert len(door._ports) == 1

    with_cell(2, test)


def test_a_planner_that_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "SILENT_S", 0.3)
    monkeypatch.setattr(port, "BEAT_S", 0.05)

    async def test(cell: Cell) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        door = await cell.door(0, cell.houses[0], Address("127.0.0.1", listener.getsockname()[1]))
        connection, _ = await asyncio.to_thread(listener.accept)
        listener.close()
        connection.sendall(packed(PLANNER_TO_DOOR.encode(Named(b"mute"))))
        await until(lambda: len(door._ports) == 2)
        await until(lambda: len(door._ports) == 1)
        connection.close()

    with_cell(1, test)
